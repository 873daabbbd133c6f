/* Products of rows with packed weights, for decode.c. */
#ifndef STROP_PACKED_PRODUCTS
#define STROP_PACKED_PRODUCTS
#include <stdint.h>
#include <string.h>
#include "vectors.h"

/* A tile of a product is ROWS rows of two vectors, as many as fit into the registers; without instructions for pairs of
 * bfloat16 one more holds what takes them apart. */
#define ROWS (LANES == 16 ? 12 : sizeof(cell) == 2 ? 5 : 6)
#define MOST_ROWS 12
#define WIDTH (2 * LANES)
#define BLOCK (8 * ROWS)
#define AHEAD 96 /* rows of a panel between the one that is read and the one that is fetched */

/* Columns of a panel: weights are packed as panels [ceil(n / WIDTH), k, WIDTH], zeros behind the last column; with BF16
 * as [ceil(n / WIDTH), k / 2, WIDTH, 2], k even. A gate and what it is for have a half of each panel. */
int64_t panel_width(void) { return WIDTH; }

/* to [count] = numbers, rounded to cells. */
static inline void narrow_all(cell *restrict to, const float *restrict from, int64_t count) {
  const int64_t whole = count / LANES * LANES;
  for (int64_t x = 0; x < whole; x += LANES) store_cells(to + x, *(const vec *)(from + x));
  for (int64_t x = whole; x < count; x++) to[x] = narrow(from[x]);
}

/* A number of the rows of a product: a cell, or where there are no instructions for pairs of those a float, rounded to one. */
#if HAS_PAIRS
typedef cell given;
static inline given given_of(float x) { return narrow(x); }
static inline void store_given(given *to, vec x) { store_cells(to, x); }
#else
typedef float given;
static inline given given_of(float x) { return wide(narrow(x)); }
static inline void store_given(given *to, vec x) { *(vec *)to = rounded(x); }
#endif

/* to [count] = numbers, for a product. */
static inline void give_all(given *restrict to, const float *restrict from, int64_t count) {
  const int64_t whole = count / LANES * LANES;
  for (int64_t x = 0; x < whole; x += LANES) store_given(to + x, *(const vec *)(from + x));
  for (int64_t x = whole; x < count; x++) to[x] = given_of(from[x]);
}

#if HAS_PAIRS
/* sums + the products of both numbers of a pair with those of each lane. */
static inline vec with_pairs(vec sums, uint32_t pair, words lanes) {
  return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)lanes);
}
#else
/* sums [m] += a number of each of m rows, which are `step` apart, times a row of a panel. */
static inline __attribute__((always_inline)) void add_products(const int m, vec (*sums)[2], const float *rows, int64_t step,
                                                               vec left, vec right) {
#pragma GCC unroll 12
  for (int i = 0; i < m; i++) {
    const float one = rows[i * step];
    sums[i][0] += one * left;
    sums[i][1] += one * right;
  }
}
#endif

/* Begin to read the pair of rows of a panel at x, or the row, AHEAD rows early; where there is a share, in its place a share of
 * the panel behind this one, for the second cache. */
static inline void fetch_weights(const cell *panel, int64_t x, const cell *next, int64_t share) {
  if (share) __builtin_prefetch(next + x * share, 0, 2);
  else
    for (int at = 0; at < 4 * WIDTH; at += 64) __builtin_prefetch((const char *)(panel + (x + AHEAD) * WIDTH) + at);
}

/* out [m, WIDTH] = a [m, k] times one panel, plus bias; m is a constant wherever this is inlined. Beside it `share` cells for
 * each of k are fetched from `next` on. */
static inline __attribute__((always_inline)) void tile(const int m, const given *restrict a, int64_t k,
                                                       const cell *restrict panel, const float *restrict bias,
                                                       const cell *next, int64_t share, float *restrict out) {
  vec sums[MOST_ROWS][2], start[2] = {{0}, {0}};
  if (bias != NULL) start[0] = *(const vec *)bias, start[1] = *(const vec *)(bias + LANES);
#pragma GCC unroll 12
  for (int i = 0; i < m; i++) sums[i][0] = start[0], sums[i][1] = start[1];
#if HAS_PAIRS
  for (int64_t x = 0; x < k; x += 2) {
    fetch_weights(panel, x, next, share);
    const words left = *(const words *)(panel + x * WIDTH), right = *(const words *)(panel + x * WIDTH + WIDTH);
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
      uint32_t pair;
      memcpy(&pair, a + i * k + x, sizeof(pair));
      sums[i][0] = with_pairs(sums[i][0], pair, left);
      sums[i][1] = with_pairs(sums[i][1], pair, right);
    }
  }
#elif defined(BF16)
  for (int64_t x = 0; x < k; x += 2) {
    fetch_weights(panel, x, next, share);
    const words left = *(const words *)(panel + x * WIDTH), right = *(const words *)(panel + x * WIDTH + WIDTH);
    add_products(m, sums, a + x, k, (vec)(left << 16), (vec)(right << 16));
    add_products(m, sums, a + x + 1, k, (vec)(left & 0xffff0000), (vec)(right & 0xffff0000));
  }
#else
  for (int64_t x = 0; x < k; x++) {
    fetch_weights(panel, x, next, share);
    add_products(m, sums, a + x, k, load_cells(panel + x * WIDTH), load_cells(panel + x * WIDTH + LANES));
  }
#endif
#pragma GCC unroll 12
  for (int i = 0; i < m; i++) {
    *(vec *)(out + i * WIDTH) = sums[i][0];
    *(vec *)(out + i * WIDTH + LANES) = sums[i][1];
  }
}

/* In tiles of about the same height: a low one takes as long as one of four rows. Where there are several, the panel behind
 * this one comes from memory beside all of them, and not beside the first one of its own alone. */
static void rows_of_panel(int64_t m, const given *a, int64_t k, const cell *panel, const float *bias, float *out) {
  const int64_t num_tiles = (m + ROWS - 1) / ROWS, share = num_tiles > 1 ? WIDTH / num_tiles : 0;
  const cell *next = panel + k * WIDTH;
  for (int64_t left = num_tiles; left > 0; left--, next += k * share) {
    const int64_t now = (m + left - 1) / left;
    switch (now) {
#define TILE(m) \
  case m:       \
    tile(m, a, k, panel, bias, next, share, out); \
    break;
      TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if LANES == 16
      TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
    m -= now, a += now * k, out += now * WIDTH;
  }
}

/* to [LANES] = silu(gate) * up of a row of a panel, of which both are halves. */
static inline void store_gated(const float *restrict row, given *restrict to) {
  cell both[WIDTH];
  narrow_all(both, row, WIDTH);
  const vec gate = load_cells(both), up = load_cells(both + LANES);
  /* Bounded: a quotient by infinity, which is an estimate that is made better, would be no number. */
  store_given(to, gate / (1 + exponential(-larger(all(-80), gate))) * up);
}

/* out [batch, n] = a [batch, k] times packed weights, plus bias (its numbers as many as the panels have; none where it is
 * NULL). Where `gated` is not NULL, the first half of a panel are LANES columns of a gate, the other one those that it is
 * for, and silu(gate) * the others goes there, and nothing to `out`. Called by all threads of a parallel region, like what
 * follows. */
static void product(const given *a, const cell *panels, const float *bias, cell *out, given *gated, int64_t batch, int64_t k,
                    int64_t n) {
  const int64_t columns = gated != NULL ? LANES : WIDTH; /* of a result, in a panel */
  const int64_t num_panels = (n + columns - 1) / columns, num_blocks = (batch + BLOCK - 1) / BLOCK;
#pragma omp for collapse(2) schedule(static)
  for (int64_t p = 0; p < num_panels; p++)
    for (int64_t block = 0; block < num_blocks; block++) {
      const int64_t start = block * BLOCK, m = batch - start < BLOCK ? batch - start : BLOCK;
      const int64_t first = p * columns, width = n - first < columns ? n - first : columns;
      float sums[BLOCK * WIDTH];
      rows_of_panel(m, a + start * k, k, panels + p * k * WIDTH, bias == NULL ? NULL : bias + p * WIDTH, sums);
      for (int64_t i = 0; i < m; i++) {
        const float *row = sums + i * WIDTH;
        const int64_t at = (start + i) * n + first;
        given whole[LANES];
        if (gated == NULL) narrow_all(out + at, row, width);
        else if (width == LANES) store_gated(row, gated + at);
        else store_gated(row, whole), memcpy(gated + at, whole, sizeof(given) * width);
      }
    }
}

/* The same, by threads of its own where that is worth their meeting. */
void multiply(const given *a, const cell *panels, const float *bias, cell *out, int64_t batch, int64_t k, int64_t n,
              int num_threads) {
#pragma omp parallel num_threads(num_threads) if (batch * k * n > 1 << 21)
  product(a, panels, bias, out, NULL, batch, k, n);
}
#endif
