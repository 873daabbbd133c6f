/* Attention of a new token over the keys and values of its sequence, for decode.c. */
#ifndef STROP_DECODE_ATTENTION
#define STROP_DECODE_ATTENTION
#include <stdint.h>
#include <string.h>
#include "vectors.h"

#define FETCHED 4096 /* bytes of keys and values between the one that is read and the one that is fetched: a page, at whose
                        end the processor's own fetching stops */

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
#endif
