/* Vectors of float, and products of matrices by tiles of them, for the functions of this folder. */
#ifndef STROP_VECTORS
#define STROP_VECTORS
#include <stdint.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

/* A tile of a product is ROWS rows of COLUMNS vectors, as many as fit into the registers. */
#ifdef __AVX512F__
#define LANES 16
#define COLUMNS 4
#else
#define LANES 8
#define COLUMNS 2
#endif
#define ROWS 6
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));

/* Heads, and sides of weights, are read as whole vectors. */
int64_t lanes(void) { return LANES; }

static inline vec load(const float *from) { return *(const vec *)from; }
static inline void store(float *to, vec x) { *(vec *)to = x; }
static inline vec all(float x) { return x - (vec){0}; }
static inline vec pick(ints where, vec x, vec other) { return (vec)((where & (ints)x) | (~where & (ints)other)); }

/* The larger of each two; the second where one is NaN. */
static inline vec larger(vec x, vec other) {
#ifdef __AVX512F__
  return (vec)_mm512_max_ps((__m512)x, (__m512)other);
#else
  return pick(x > other, x, other);
#endif
}

/* e^x for x up to 88, and 0 far below -87: to 1e-7 of it. Source: the polynomial of expf in Cephes. */
static inline vec exponential(vec x) {
#ifdef __AVX512F__
  const vec bounded = larger(all(-200), x);
  const vec n = (vec)_mm512_roundscale_ps((__m512)(bounded * 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
#else
  const vec bounded = pick(x < -87.0f, all(-87), pick(x > 88.0f, all(88), x)), scaled = bounded * 1.44269504f;
  const ints whole = __builtin_convertvector(scaled + pick(scaled < 0, all(-0.5f), all(0.5f)), ints);
  const vec n = __builtin_convertvector(whole, vec);
#endif
  const vec r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return pick(x < -87.0f, (vec){0}, p * (vec)((whole + 127) << 23));
#endif
}

static inline vec sigmoid(vec x) { return 1 / (1 + exponential(-x)); }


#if LANES == 16
#define EACH_LANE {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define EACH_LANE {0, 1, 2, 3, 4, 5, 6, 7}
#endif

/* to [LANES, LANES]: from [LANES, LANES] transposed, by exchanging squares of half of it, then of a quarter, and so on. */
static inline void transpose(const float *from, int64_t from_row, float *to, int64_t to_row) {
  const ints lane = EACH_LANE;
  vec v[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) v[i] = load(from + i * from_row);
#pragma GCC unroll 4
  for (int size = LANES / 2; size; size /= 2) {
    const ints is_right = (lane & size) != 0;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & size)) {
        const vec above = v[i], below = v[i + size];
        v[i] = __builtin_shuffle(above, below, lane + (is_right & (LANES - size)));
        v[i + size] = __builtin_shuffle(above, below, lane + size + (is_right & (LANES - size)));
      }
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) store(to + i * to_row, v[i]);
}

/* c [rows, columns LANES] (+)= a times b [depth, columns LANES]; a at r, k is a[r * a_row + k * a_depth]. */
static inline __attribute__((always_inline)) void tile(int rows, int columns, int64_t depth, const float *restrict a,
                                                       int64_t a_row, int64_t a_depth, const float *restrict b, int64_t b_row,
                                                       float *restrict c, int64_t c_row, int adds) {
  vec sums[ROWS][COLUMNS];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int x = 0; x < columns; x++) sums[r][x] = adds ? load(c + r * c_row + x * LANES) : (vec){0};
  for (int64_t k = 0; k < depth; k++) {
    vec right[COLUMNS];
#pragma GCC unroll 4
    for (int x = 0; x < columns; x++) right[x] = load(b + k * b_row + x * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const float left = a[r * a_row + k * a_depth];
#pragma GCC unroll 4
      for (int x = 0; x < columns; x++) sums[r][x] += left * right[x];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int x = 0; x < columns; x++) store(c + r * c_row + x * LANES, sums[r][x]);
}

#define TILE(rows, columns) \
  case 8 * (rows) + (columns): \
    tile(rows, columns, depth, left, a_row, a_depth, b + j, b_row, c + i * c_row + j, c_row, adds); \
    break;
#define TILES(rows) TILE(rows, 1) TILE(rows, 2)
#if COLUMNS == 4
#define MORE(rows) TILE(rows, 3) TILE(rows, 4)
#else
#define MORE(rows)
#endif

/* c [rows, width] (+)= a times b [depth, width], of any size; width is a multiple of LANES. */
static void product(int64_t rows, int64_t width, int64_t depth, const float *a, int64_t a_row, int64_t a_depth, const float *b,
                    int64_t b_row, float *c, int64_t c_row, int adds) {
  for (int64_t j = 0; j < width; j += COLUMNS * LANES) {
    const int64_t columns = (width - j) / LANES < COLUMNS ? (width - j) / LANES : COLUMNS;
    for (int64_t i = 0; i < rows; i += ROWS) {
      const int64_t some = rows - i < ROWS ? rows - i : ROWS;
      const float *left = a + i * a_row;
      switch (8 * some + columns) {
        TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
        MORE(1) MORE(2) MORE(3) MORE(4) MORE(5) MORE(6)
      }
    }
  }
}
#endif
