/* Products of matrices in float by tiles of vectors, for the functions of this folder. */
#ifndef STROP_TILES
#define STROP_TILES
#include "vectors.h"

/* A tile of a product is ROWS rows of COLUMNS vectors, as many as fit into the registers. */
#define COLUMNS (LANES == 16 ? 4 : 2)
#define ACROSS (COLUMNS * LANES)
#define ROWS 6

/* Heads, and sides of weights, are read as whole vectors. */
int64_t lanes(void) { return LANES; }

static inline vec load(const float *from) { return *(const vec *)from; }
static inline void store(float *to, vec x) { *(vec *)to = x; }
static inline vec sigmoid(vec x) { return 1 / (1 + exponential(-x)); }

#if LANES == 16
#define EACH_LANE {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define EACH_LANE {0, 1, 2, 3, 4, 5, 6, 7}
#endif

/* v: from [LANES, LANES] transposed, by exchanging squares of half of it, then of a quarter, and so on. */
static inline __attribute__((always_inline)) void turned(const float *from, int64_t from_row, vec v[LANES]) {
  const ints lane = EACH_LANE;
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
}

static inline void transpose(const float *from, int64_t from_row, float *to, int64_t to_row) {
  vec v[LANES];
  turned(from, from_row, v);
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
#if LANES == 16
#define MORE(rows) TILE(rows, 3) TILE(rows, 4)
#else
#define MORE(rows)
#endif

/* c [rows, width] (+)= a times b [depth, width], of any size; width is a multiple of LANES. */
static void product(int64_t rows, int64_t width, int64_t depth, const float *a, int64_t a_row, int64_t a_depth, const float *b,
                    int64_t b_row, float *c, int64_t c_row, int adds) {
  for (int64_t j = 0; j < width; j += ACROSS) {
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
