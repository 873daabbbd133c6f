/* Decode steps and prefills for a CPU.
 *
 * decode: attention of one new token per sequence over the keys and values of its own slot, which the token enters
 * first; reads each sequence to its own length, and everything once for all query heads of a key head. step: all layers
 * of a model of Llama's form for new tokens of some sequences, one of each in a decode step.
 *
 * Compiled by kernel.py with DIM (numbers per head), KV_HEADS, GROUP (query heads of each key head), and BF16 where
 * weights and cache are bfloat16: a `cell` is a number of those. Sums are float; with BF16 what goes into and comes out
 * of a matrix product is rounded to bfloat16, as in a model of that precision, and numbers go into it in pairs.
 *
 * What becomes of a token depends neither on other sequences nor on how many tokens of its own are in the step: every
 * sum is made in an order of its own, and none is reordered (-fno-associative-math) but where `omp simd` says so, by the
 * length of the sum alone.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "vectors.h"

/* A tile of a product is ROWS rows of two vectors, as many as fit into the registers. */
#define ROWS (LANES == 16 ? 12 : 6)
#define MOST_ROWS 12
#define WIDTH (2 * LANES)
#define BLOCK (8 * ROWS)
#define AHEAD 96 /* rows of a panel between the one that is read and the one that is fetched */
#define FETCHED 4096 /* bytes of keys and values between the one that is read and the one that is fetched: a page, at whose
                        end the processor's own fetching stops */

/* Columns of a panel: weights are packed as panels [ceil(n / WIDTH), k, WIDTH], zeros behind the last column; with BF16
 * as [ceil(n / WIDTH), k / 2, WIDTH, 2], k even. A gate and what it is for have a half of each panel. */
int64_t panel_width(void) { return WIDTH; }

/* Begin to read some numbers, which may lie anywhere: a prefetch has no faults. */
static inline __attribute__((always_inline)) void fetch(const cell *from, int64_t count) {
  for (int64_t at = 0; at < count; at += 64 / sizeof(cell)) __builtin_prefetch(from + at);
}
#define FAR (int64_t)(FETCHED / sizeof(cell))

static inline float largest_of(vec x) {
#if IS_WIDE
  return _mm512_reduce_max_ps((__m512)x);
#else
  float largest = x[0];
  for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
  return largest;
#endif
}

static inline float total_of(vec x) {
#if IS_WIDE
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
#endif
}

/* to [count] = numbers, rounded to cells. */
static inline void narrow_all(cell *restrict to, const float *restrict from, int64_t count) {
  const int64_t whole = count / LANES * LANES;
  for (int64_t x = 0; x < whole; x += LANES) store_cells(to + x, *(const vec *)(from + x));
  for (int64_t x = whole; x < count; x++) to[x] = narrow(from[x]);
}

/* Keys or values [tokens, DIM] of a sequence, the first `num_shared` of which, in whole blocks of LANES, lie with another
 * one that begins alike: they are in a cache when several sequences read them in turn. */
struct run {
  const cell *shared, *own;
  int64_t num_shared;
};
static inline __attribute__((always_inline)) const cell *token_at(struct run run, int64_t t) {
  return (t < run.num_shared ? run.shared : run.own) + t * DIM;
}

/* Begin to read the vector of tokens that is a page behind token t, if it is one of `count`. */
static inline void fetch_ahead(struct run run, int64_t t, int64_t count) {
  if (t + FAR / DIM < count) fetch(token_at(run, t + FAR / DIM), LANES * DIM);
}

/* Begin to read a page of `count` tokens: of those that lie with no other sequence, which has read the others just now. */
static inline void fetch_own(struct run run, int64_t count) {
  const int64_t first = run.shared == run.own || run.num_shared < 0 ? 0 : run.num_shared, num = (count - first) * DIM;
  if (num > 0) fetch(run.own + first * DIM, num < FAR ? num : FAR);
}

#if DIM % LANES == 0
#define PARTS (DIM / LANES)
#if HAS_PAIRS && PARTS % 2 == 0
typedef cell number; /* of a query: a product of keys and queries takes pairs */
static inline number number_of(cell x) { return x; }
#else
typedef float number;
static inline number number_of(cell x) { return wide(x); }
#endif

/* Of a and b in turn, `width` numbers each, those of the lower or upper half of every lane: with these added, a vector holds
 * partial sums of both. */
#define LANE(width) ((width) < 4 ? 4 : 2 * (width))
#define PICK(width, x) \
  ((x) / LANE(width) * LANE(width) + (x) % LANE(width) / (2 * (width)) * (width) + (x) % (width) + (x) / (width) % 2 * LANES)
#define PICK_4(width, x) PICK(width, x), PICK(width, (x) + 1), PICK(width, (x) + 2), PICK(width, (x) + 3)
#if LANES == 16
#define PICKS(width) ((words){PICK_4(width, 0), PICK_4(width, 4), PICK_4(width, 8), PICK_4(width, 12)})
#else
#define PICKS(width) ((words){PICK_4(width, 0), PICK_4(width, 4)})
#endif
#define FOLD(width) \
  _Pragma("GCC unroll 8") for (int i = 0; i < LANES / 2 / (width); i++) \
    v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], PICKS(width)) + \
           __builtin_shuffle(v[2 * i], v[2 * i + 1], PICKS(width) + LANE(width) / 2);

/* The sums of LANES vectors, which are lost. */
static inline __attribute__((always_inline)) vec sums_of(vec *v) {
  FOLD(1) FOLD(2) FOLD(4)
#if LANES == 16
  FOLD(8)
#endif
  return v[0];
}

/* scores [GROUP, ...], with rows `stride` apart: queries [GROUP, DIM] times keys [count, DIM], LANES keys at once; behind
 * the last key stands its score again. */
static inline void score(const number *restrict queries, struct run keys, int64_t count, float *restrict scores,
                         int64_t stride) {
  for (int64_t t = 0; t < count; t += LANES) {
    const cell *block = token_at(keys, t);
    const int64_t last = count - 1 - t;
    fetch_ahead(keys, t, count);
    for (int r = 0; r < GROUP; r++) {
      vec v[LANES];
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) {
        const cell *key = block + (j < last ? j : last) * DIM;
#if HAS_PAIRS && PARTS % 2 == 0
        v[j] = (vec){0};
#pragma GCC unroll 8
        for (int x = 0; x < DIM; x += 2 * LANES)
          v[j] = (vec)_mm512_dpbf16_ps((__m512)v[j], (__m512bh)_mm512_loadu_si512(key + x),
                                       (__m512bh)_mm512_loadu_si512(queries + r * DIM + x));
#else
        v[j] = load_cells(key) * *(const vec *)(queries + r * DIM);
#pragma GCC unroll 16
        for (int x = 1; x < PARTS; x++) v[j] += load_cells(key + x * LANES) * *(const vec *)(queries + r * DIM + x * LANES);
#endif
      }
      *(vec *)(scores + r * stride + t) = sums_of(v);
    }
  }
}

#define TOGETHER (PARTS < 4 ? PARTS : 4) /* vectors of a row that are summed in registers, for some queries at once */
#define QUERIES (12 / TOGETHER < GROUP ? 12 / TOGETHER : GROUP)
#define STREAMS (QUERIES * TOGETHER > 4 ? 1 : QUERIES * TOGETHER > 2 ? 2 : 4) /* sums of few vectors wait for each other */
#if defined(BF16) && PARTS % 2 == 0 /* numbers at even places are summed in one vector, those at odd places in the next */
#define IN_TURN 1
#define TURN_4(x) (x), (x) + LANES, (x) + 1, (x) + 1 + LANES
#if LANES == 16
#define TURN(x) ((words){TURN_4(x), TURN_4((x) + 2), TURN_4((x) + 4), TURN_4((x) + 6)})
#else
#define TURN(x) ((words){TURN_4(x), TURN_4((x) + 2)})
#endif
#else
#define IN_TURN 0
#endif
/* sums [QUERIES, TOGETHER] += a part of the values of a token times its weights in rows, the last one again behind them. */
static inline __attribute__((always_inline)) void add_part(const float *restrict weights, int num_rows, int64_t stride,
                                                           const cell *restrict value, int part, vec (*sums)[TOGETHER]) {
  vec row[TOGETHER] = {{0}};
#if IN_TURN
  for (int x = 0; x < TOGETHER && part + x < PARTS; x += 2) {
    const words both = *(const words *)(value + (part + x) * LANES);
    row[x] = (vec)(both << 16), row[x + 1] = (vec)(both & 0xffff0000);
  }
#else
  for (int x = 0; x < TOGETHER && part + x < PARTS; x++) row[x] = load_cells(value + (part + x) * LANES);
#endif
  for (int r = 0; r < QUERIES; r++) {
    const float weight = weights[(r < num_rows ? r : num_rows - 1) * stride];
    for (int x = 0; x < TOGETHER && part + x < PARTS; x++) sums[r][x] += weight * row[x];
  }
}

/* out [GROUP, DIM]: the sum of values [count, DIM], with weights [GROUP, ...] whose rows are `stride` apart, times the
 * factor of the row. */
static inline void gather(const float *restrict weights, int64_t stride, const float *factors, struct run values,
                          int64_t count, float *restrict out) {
  for (int part = 0; part < PARTS; part += TOGETHER)
    for (int from = 0; from < GROUP; from += QUERIES) {
      vec sums[STREAMS][QUERIES][TOGETHER] = {{{{0}}}};
      for (int64_t t = 0; t < count; t += LANES) {
        const cell *block = token_at(values, t);
        const float *now = weights + from * stride + t;
        const int64_t num = count - t < LANES ? count - t : LANES;
        fetch_ahead(values, t, count);
        int64_t j = 0;
        for (; j + STREAMS <= num; j += STREAMS)
#pragma GCC unroll 4
          for (int s = 0; s < STREAMS; s++) add_part(now + j + s, GROUP - from, stride, block + (j + s) * DIM, part, sums[s]);
        for (; j < num; j++) add_part(now + j, GROUP - from, stride, block + j * DIM, part, sums[0]);
      }
      for (int s = 1; s < STREAMS; s++)
        for (int r = 0; r < QUERIES; r++)
          for (int x = 0; x < TOGETHER; x++) sums[0][r][x] += sums[s][r][x];
      for (int r = 0; r < QUERIES && from + r < GROUP; r++)
        for (int x = 0; x < TOGETHER && part + x < PARTS; x++) {
#if IN_TURN
          const vec *two = sums[0][r] + x / 2 * 2, now = __builtin_shuffle(two[0], two[1], x % 2 ? TURN(LANES / 2) : TURN(0));
#else
          const vec now = sums[0][r][x];
#endif
          *(vec *)(out + (from + r) * DIM + (part + x) * LANES) = now * factors[from + r];
        }
    }
}
#else
typedef float number;
static inline number number_of(cell x) { return wide(x); }
static inline void score(const number *restrict queries, struct run keys, int64_t count, float *restrict scores,
                         int64_t stride) {
  for (int64_t t = 0; t < (count + LANES - 1) / LANES * LANES; t++)
    for (int r = 0; r < GROUP; r++) {
      const cell *key = token_at(keys, t < count ? t : count - 1);
      float product = 0;
#pragma omp simd reduction(+ : product)
      for (int x = 0; x < DIM; x++) product += wide(key[x]) * queries[r * DIM + x];
      scores[r * stride + t] = product;
    }
}

static inline void gather(const float *restrict weights, int64_t stride, const float *factors, struct run values,
                          int64_t count, float *restrict out) {
  memset(out, 0, sizeof(float) * GROUP * DIM);
  for (int64_t t = 0; t < count; t++)
    for (int r = 0; r < GROUP; r++)
      for (int x = 0; x < DIM; x++) out[r * DIM + x] += weights[r * stride + t] * wide(token_at(values, t)[x]);
  for (int r = 0; r < GROUP; r++)
    for (int x = 0; x < DIM; x++) out[r * DIM + x] *= factors[r];
}
#endif

/* One token and key head: query [GROUP, DIM], keys and values [count, DIM], out [GROUP, DIM]; scores is room for
 * [GROUP, stride]. head_step: from these keys to those that are read next. */
static void attend(const cell *query, struct run keys, struct run values, int64_t head_step, int64_t count, float scaling,
                   float *restrict scores, int64_t stride, float *restrict out) {
  const int64_t filled = (count + LANES - 1) / LANES * LANES;
  float factors[GROUP];
  number queries[GROUP * DIM];
#ifdef BF16 /* a query goes into the product as it is */
  for (int x = 0; x < GROUP * DIM; x++) queries[x] = number_of(query[x]);
#else
  for (int x = 0; x < GROUP * DIM; x++) queries[x] = query[x] * scaling;
  scaling = 1;
#endif
  fetch_own(values, count);
  score(queries, keys, count, scores, stride);
  keys.shared += head_step, keys.own += head_step;
  fetch_own(keys, count);
  for (int r = 0; r < GROUP; r++) {
    float *restrict row = scores + r * stride;
    vec largest = *(vec *)row, total = {0};
    for (int64_t t = LANES; t < filled; t += LANES) largest = larger(*(vec *)(row + t), largest);
    const float most = largest_of(largest);
    for (int64_t t = 0; t < filled; t += LANES) *(vec *)(row + t) = exponential((*(vec *)(row + t) - most) * scaling);
    for (int64_t t = count; t < filled; t++) row[t] = 0;
    for (int64_t t = 0; t < filled; t += LANES) total += *(vec *)(row + t);
    factors[r] = 1 / total_of(total);
  }
  gather(scores, stride, factors, values, count, out);
}

/* Room for the scores of a query, in whole vectors: rows begin at the same place of a cache line, however long the longest
 * sequence is. */
static int64_t scores_stride(int64_t num_tokens) { return (num_tokens + 15) / 16 * 16; }

/* strides: from token to token and from head to head of query, key and value, then from slot to slot and from head to
 * head of the cache. lengths [batch]: tokens in each slot before the new one. window: 0 for none. Returns 0, or 1 where
 * there is no memory for the scores. */
int decode(const float *query, const float *key, const float *value, float *out, cell *keys, cell *values,
           const int64_t *lengths, int64_t batch, int64_t num_tokens, const int64_t *strides, float scaling,
           int64_t window, int num_threads) {
  int failed = 0;
#pragma omp parallel num_threads(num_threads) reduction(| : failed)
  {
    const int64_t stride = scores_stride(num_tokens);
    float *scores = aligned_alloc(64, sizeof(float) * GROUP * stride);
    failed |= scores == NULL;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < batch; i++)
      for (int64_t h = 0; scores != NULL && h < KV_HEADS; h++) {
        const int64_t at = i * strides[6] + h * strides[7], last = lengths[i];
        const float *new_key = key + i * strides[2] + h * strides[3];
        const float *new_value = value + i * strides[4] + h * strides[5];
        cell queries[GROUP * DIM];
        for (int r = 0; r < GROUP; r++)
          narrow_all(queries + r * DIM, query + i * strides[0] + (h * GROUP + r) * strides[1], DIM);
        narrow_all(keys + at + last * DIM, new_key, DIM);
        narrow_all(values + at + last * DIM, new_value, DIM);
        const int64_t first = window > 0 && last + 1 > window ? last + 1 - window : 0;
        const cell *own_keys = keys + at + first * DIM, *own_values = values + at + first * DIM;
        const struct run seen = {own_keys, own_keys, 0}, weighed = {own_values, own_values, 0};
        attend(queries, seen, weighed, strides[7], last + 1 - first, scaling, scores, stride,
               out + (i * KV_HEADS + h) * GROUP * DIM);
      }
    free(scores);
  }
  return failed;
}

/* One head of a new token: norm (none where `weight` is NULL), then rotary position; `out` may be `from`. */
static void turned(const cell *from, const float *weight, float eps, const float *cosine, const float *sine, cell *out) {
  float row[DIM], rotated[DIM];
  for (int x = 0; x < DIM; x++) row[x] = wide(from[x]);
  if (weight != NULL) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int x = 0; x < DIM; x++) total += row[x] * row[x];
    const float factor = 1 / sqrtf(total / DIM + eps);
    for (int x = 0; x < DIM; x++) row[x] *= factor * weight[x];
  }
  for (int x = 0; x < DIM / 2; x++) {
    rotated[x] = row[x] * cosine[x] - row[x + DIM / 2] * sine[x];
    rotated[x + DIM / 2] = row[x + DIM / 2] * cosine[x + DIM / 2] + row[x] * sine[x + DIM / 2];
  }
  narrow_all(out, rotated, DIM);
}

#ifdef BF16
/* sums + the products of both numbers of a pair with those of each lane. */
static inline vec with_pairs(vec sums, uint32_t pair, words lanes) {
#if HAS_PAIRS
  return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)lanes);
#else
  sums += wide(pair) * (vec)(lanes << 16);
  return sums + wide(pair >> 16) * (vec)(lanes & 0xffff0000);
#endif
}
#endif

/* out [m, WIDTH] = a [m, k] times one panel, plus bias; m is a constant wherever this is inlined. */
static inline __attribute__((always_inline)) void tile(const int m, const cell *restrict a, int64_t k,
                                                       const cell *restrict panel, const float *restrict bias,
                                                       float *restrict out) {
  vec sums[MOST_ROWS][2], start[2] = {{0}, {0}};
  if (bias != NULL) start[0] = *(const vec *)bias, start[1] = *(const vec *)(bias + LANES);
#pragma GCC unroll 12
  for (int i = 0; i < m; i++) sums[i][0] = start[0], sums[i][1] = start[1];
#ifdef BF16
  for (int64_t x = 0; x < k; x += 2) {
    for (int64_t at = 0; at < 2 * WIDTH; at += 32) __builtin_prefetch(panel + (x + AHEAD) * WIDTH + at);
    const words left = *(const words *)(panel + x * WIDTH), right = *(const words *)(panel + x * WIDTH + WIDTH);
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
      uint32_t pair;
      memcpy(&pair, a + i * k + x, sizeof(pair));
      sums[i][0] = with_pairs(sums[i][0], pair, left);
      sums[i][1] = with_pairs(sums[i][1], pair, right);
    }
  }
#else
  for (int64_t x = 0; x < k; x++) {
    for (int64_t at = 0; at < WIDTH; at += 16) __builtin_prefetch(panel + (x + AHEAD) * WIDTH + at);
    const vec left = load_cells(panel + x * WIDTH), right = load_cells(panel + x * WIDTH + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
      const float one = a[i * k + x];
      sums[i][0] += one * left;
      sums[i][1] += one * right;
    }
  }
#endif
#pragma GCC unroll 12
  for (int i = 0; i < m; i++) {
    *(vec *)(out + i * WIDTH) = sums[i][0];
    *(vec *)(out + i * WIDTH + LANES) = sums[i][1];
  }
}

/* In tiles of about the same height: a low one takes as long as one of four rows. */
static void rows_of_panel(int64_t m, const cell *a, int64_t k, const cell *panel, const float *bias, float *out) {
  for (int64_t left = (m + ROWS - 1) / ROWS; left > 0; left--) {
    const int64_t now = (m + left - 1) / left;
    switch (now) {
#define TILE(m) \
  case m:       \
    tile(m, a, k, panel, bias, out); \
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
static inline void gated(const float *restrict row, cell *restrict to) {
  cell both[WIDTH];
  narrow_all(both, row, WIDTH);
  const vec gate = load_cells(both), up = load_cells(both + LANES);
  /* Bounded: a quotient by infinity, which is an estimate that is made better, would be no number. */
  store_cells(to, gate / (1 + exponential(-larger(all(-80), gate))) * up);
}

/* out [batch, n] = a [batch, k] times packed weights, plus bias (its numbers as many as the panels have; none where it is
 * NULL). is_gated: the first half of a panel are LANES columns of a gate, the other one those that it is for, and out is
 * silu(gate) * the others. Called by all threads of a parallel region, like what follows. */
static void product(const cell *a, const cell *panels, const float *bias, cell *out, int64_t batch, int64_t k, int64_t n,
                    int is_gated) {
  const int64_t columns = is_gated ? LANES : WIDTH; /* of out, in a panel */
  const int64_t num_panels = (n + columns - 1) / columns, num_blocks = (batch + BLOCK - 1) / BLOCK;
#pragma omp for collapse(2) schedule(static)
  for (int64_t p = 0; p < num_panels; p++)
    for (int64_t block = 0; block < num_blocks; block++) {
      const int64_t start = block * BLOCK, m = batch - start < BLOCK ? batch - start : BLOCK;
      const int64_t first = p * columns, width = n - first < columns ? n - first : columns;
      float sums[BLOCK * WIDTH];
      rows_of_panel(m, a + start * k, k, panels + p * k * WIDTH, bias == NULL ? NULL : bias + p * WIDTH, sums);
      for (int64_t i = 0; i < m; i++) {
        cell whole[LANES], *to = out + (start + i) * n + first;
        if (!is_gated) narrow_all(to, sums + i * WIDTH, width);
        else if (width == LANES) gated(sums + i * WIDTH, to);
        else gated(sums + i * WIDTH, whole), memcpy(to, whole, sizeof(cell) * width);
      }
    }
}

/* The same, by threads of its own where that is worth their meeting. */
void multiply(const cell *a, const cell *panels, const float *bias, cell *out, int64_t batch, int64_t k, int64_t n,
              int num_threads) {
#pragma omp parallel num_threads(num_threads) if (batch * k * n > 1 << 21)
  product(a, panels, bias, out, batch, k, n, 0);
}

struct layer { /* as Layer of kernel.py has it */
  const cell *qkv, *out, *gate_up, *down; /* packed weights, those of several projections side by side */
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias; /* NULL: none */
  const float *query_norm, *key_norm;                          /* NULL: none */
  const float *next_norm, *next_layer_norm; /* of what follows the attention, and of what follows this layer */
  int64_t window;                           /* 0: none */
  float eps, scaling;
};

struct sequence { /* keys and values of a layer are [KV_HEADS, tokens, DIM] */
  cell *keys, *values; /* of the first layer */
  int64_t layer_step, head_step;
  int64_t shared_at, num_shared; /* the first tokens are also there, in numbers from `keys` and `values` on */
};

struct token { /* a new one */
  int64_t sequence, place; /* in the sequence */
};

static inline int64_t place_of(const struct sequence *sequence, int64_t layer, int64_t head, int64_t token) {
  return layer * sequence->layer_step + head * sequence->head_step + token * DIM;
}

/* Key and value of one key head of a new token, which lie in its row behind the queries, enter its sequence; the queries of
 * that head are turned where they are. */
static void enter(const struct layer *layer, int64_t number, cell *row, const float *cosines, const float *sines,
                  const struct sequence *sequences, struct token token, int64_t h) {
  const int heads = KV_HEADS * GROUP;
  const struct sequence *sequence = sequences + token.sequence;
  const int64_t at = place_of(sequence, number, h, token.place);
  const float *cosine = cosines + token.place * DIM, *sine = sines + token.place * DIM;
  turned(row + (heads + h) * DIM, layer->key_norm, layer->eps, cosine, sine, sequence->keys + at);
  memcpy(sequence->values + at, row + (heads + KV_HEADS + h) * DIM, sizeof(cell) * DIM);
  for (int r = 0; r < GROUP; r++) {
    cell *query = row + (h * GROUP + r) * DIM;
    turned(query, layer->query_norm, layer->eps, cosine, sine, query);
  }
}

/* One key head of a token that has entered: out [GROUP * DIM] of what it sees, its sequence up to itself. */
static void attend_one(const struct layer *layer, int64_t number, const cell *row, const struct sequence *sequences,
                       struct token token, int64_t h, cell *out, int64_t stride, float *scores) {
  const struct sequence *sequence = sequences + token.sequence;
  const int64_t num_seen = token.place + 1;
  const int64_t first = layer->window > 0 && num_seen > layer->window ? num_seen - layer->window : 0;
  const int64_t at = place_of(sequence, number, h, first), shared_at = at + sequence->shared_at;
  const int64_t num_shared = (sequence->num_shared - first) / LANES * LANES;
  const struct run keys = {sequence->keys + shared_at, sequence->keys + at, num_shared};
  const struct run values = {sequence->values + shared_at, sequence->values + at, num_shared};
  float attended[GROUP * DIM];
  attend(row + h * GROUP * DIM, keys, values, sequence->head_step, num_seen - first, layer->scaling, scores, stride,
         attended);
  narrow_all(out, attended, GROUP * DIM);
}

/* stream [batch, size] += added (none where it is NULL); its root-mean-square norm times weight goes to `out`, and to `last`
 * alone where that is not NULL. */
static void add_norm(float *stream, const cell *added, const float *weight, float eps, cell *out, float *last,
                     int64_t batch, int64_t size) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < batch; i++) {
    float *restrict row = stream + i * size, total = 0;
    if (added != NULL)
      for (int64_t x = 0; x < size; x++) row[x] += wide(added[i * size + x]);
#pragma omp simd reduction(+ : total)
    for (int64_t x = 0; x < size; x++) total += row[x] * row[x];
    const float factor = 1 / sqrtf(total / size + eps);
    if (last != NULL)
      for (int64_t x = 0; x < size; x++) last[i * size + x] = row[x] * factor * weight[x];
    else
      for (int64_t x = 0; x < size; x++) out[i * size + x] = narrow(row[x] * factor * weight[x]);
  }
}

/* Numbers of the room that a step with so many new tokens needs. */
int64_t step_room(int64_t count, int64_t size, int64_t inner, int64_t longest, int num_threads) {
  const int64_t heads = KV_HEADS * GROUP, rows = (heads + 2 * KV_HEADS) * DIM;
  return num_threads * GROUP * scores_stride(longest) + count * (3 * size + rows + heads * DIM + inner);
}

/* out [num_ends, size]: final hidden states, normed, of the tokens at rows ends [num_ends], of `count` new ones, whose
 * embeddings are in stream [count, size] (which is written to). In a decode step each sequence has one token, and `ends` are
 * all rows; else they are the last ones of their sequences, or fewer. Tokens of a sequence lie in its order.
 * cosines, sines: [positions, DIM]. longest: tokens of the longest sequence with its new ones. */
void step(const struct layer *layers, int64_t num_layers, const float *first_norm, float *stream, float *out,
          const float *cosines, const float *sines, const struct sequence *sequences, const struct token *tokens,
          const int64_t *ends, int64_t count, int64_t num_ends, int64_t size, int64_t inner, int64_t longest, float *room,
          int num_threads) {
  const int64_t heads = KV_HEADS * GROUP * DIM, rows_size = heads + 2 * KV_HEADS * DIM, stride = scores_stride(longest);
  const int is_decode = num_ends == count;
  /* A thread takes its share of a decode step, and few rows of a prefill at a time, where the later ones see more. */
  const int64_t at_a_time = is_decode ? (count * KV_HEADS + num_threads - 1) / num_threads : 8 * KV_HEADS;
  float *last = room + num_threads * GROUP * stride;
  cell *rows = (cell *)(last + num_ends * size), *normed = rows + count * rows_size, *attended = normed + count * size;
  cell *added = attended + count * heads, *gated = added + count * size;
#pragma omp parallel num_threads(num_threads)
  {
    float *scores = room + omp_get_thread_num() * GROUP * stride, *now = stream;
    int64_t num_rows = count;
    add_norm(now, NULL, first_norm, layers[0].eps, normed, NULL, count, size);
    for (int64_t number = 0; number < num_layers; number++) {
      const struct layer *layer = layers + number;
      const int is_last = number == num_layers - 1;
      product(normed, layer->qkv, layer->qkv_bias, rows, count, size, rows_size, 0);
      if (!is_decode) { /* a token sees others of this step */
#pragma omp for collapse(2) schedule(static)
        for (int64_t i = 0; i < count; i++)
          for (int64_t h = 0; h < KV_HEADS; h++)
            enter(layer, number, rows + i * rows_size, cosines, sines, sequences, tokens[i], h);
        if (is_last) { /* only the end of each sequence goes on */
#pragma omp for schedule(static)
          for (int64_t i = 0; i < num_ends; i++) memcpy(last + i * size, stream + ends[i] * size, sizeof(float) * size);
          now = last, num_rows = num_ends;
        }
      }
#pragma omp for collapse(2) schedule(static, at_a_time)
      for (int64_t i = 0; i < num_rows; i++)
        for (int64_t h = 0; h < KV_HEADS; h++) {
          const int64_t at = num_rows < count ? ends[i] : i;
          cell *row = rows + at * rows_size;
          if (is_decode) enter(layer, number, row, cosines, sines, sequences, tokens[at], h);
          attend_one(layer, number, row, sequences, tokens[at], h, attended + i * heads + h * GROUP * DIM, stride, scores);
        }
      product(attended, layer->out, layer->out_bias, added, num_rows, heads, size, 0);
      add_norm(now, added, layer->next_norm, layer->eps, normed, NULL, num_rows, size);
      product(normed, layer->gate_up, layer->gate_up_bias, gated, num_rows, size, inner, 1);
      product(gated, layer->down, layer->down_bias, added, num_rows, inner, size, 0);
      add_norm(now, added, layer->next_layer_norm, layer->eps, normed, is_last ? out : NULL, num_rows, size);
    }
  }
}
