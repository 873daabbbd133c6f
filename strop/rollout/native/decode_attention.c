/* Attention of one new token per sequence over the keys and values of its own slot, which the token enters first.
 *
 * Compiled by kernel.py with DIM (numbers per head), KV_HEADS, GROUP (query heads of each key head), and BF16 where the
 * cache holds bfloat16. Reads each sequence to its own length, and everything once for all query heads of a key head.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef BF16
typedef uint16_t cell;
static inline float wide(cell x) {
  union { uint32_t bits; float value; } both = {.bits = (uint32_t)x << 16};
  return both.value;
}
static inline cell narrow(float x) { /* to nearest, ties to even; NaN stays NaN */
  union { float value; uint32_t bits; } both = {.value = x};
  if ((both.bits & 0x7fffffff) > 0x7f800000) return (both.bits >> 16) | 0x40;
  return (both.bits + 0x7fff + ((both.bits >> 16) & 1)) >> 16;
}
#else
typedef float cell;
static inline float wide(cell x) { return x; }
static inline cell narrow(float x) { return x; }
#endif

/* One sequence and key head: query [GROUP, DIM] with rows `query_stride` apart, cache [tokens, DIM], out [GROUP, DIM].
 * Tokens first..last are seen; scores is room for [GROUP, stride]. */
static void attend(const float *query, int64_t query_stride, const cell *restrict keys, const cell *restrict values,
                   int64_t first, int64_t last, float scaling, float *restrict scores, int64_t stride,
                   float *restrict out) {
  float scaled[GROUP][DIM], sums[GROUP][DIM] = {{0}}, weights[GROUP];
  for (int r = 0; r < GROUP; r++)
    for (int x = 0; x < DIM; x++) scaled[r][x] = query[r * query_stride + x] * scaling;
  for (int64_t t = first; t <= last; t++) {
    float row[DIM];
    for (int x = 0; x < DIM; x++) row[x] = wide(keys[t * DIM + x]);
    for (int r = 0; r < GROUP; r++) {
      float product = 0;
      for (int x = 0; x < DIM; x++) product += row[x] * scaled[r][x];
      scores[r * stride + t] = product;
    }
  }
  for (int r = 0; r < GROUP; r++) {
    float *restrict score = scores + r * stride, most = -FLT_MAX, total = 0;
    for (int64_t t = first; t <= last; t++) most = score[t] > most ? score[t] : most;
    for (int64_t t = first; t <= last; t++) score[t] = expf(score[t] - most);
    for (int64_t t = first; t <= last; t++) total += score[t];
    weights[r] = 1 / total;
  }
  for (int64_t t = first; t <= last; t++) {
    float row[DIM];
    for (int x = 0; x < DIM; x++) row[x] = wide(values[t * DIM + x]);
    for (int r = 0; r < GROUP; r++)
      for (int x = 0; x < DIM; x++) sums[r][x] += scores[r * stride + t] * row[x];
  }
  for (int r = 0; r < GROUP; r++)
    for (int x = 0; x < DIM; x++) out[r * DIM + x] = sums[r][x] * weights[r];
}

/* strides: from token to token and from head to head of query, key and value, then from slot to slot and from head to
 * head of the cache. lengths [batch]: tokens in each slot before the new one. window: 0 for none. Returns 0, or 1 where
 * there is no memory for the scores. */
int decode(const float *query, const float *key, const float *value, float *out, cell *keys, cell *values,
           const int64_t *lengths, int64_t batch, int64_t num_tokens, const int64_t *strides, float scaling,
           int64_t window, int num_threads) {
  int failed = 0;
#pragma omp parallel num_threads(num_threads) reduction(| : failed)
  {
    float *scores = malloc(sizeof(float) * GROUP * num_tokens);
    failed |= scores == NULL;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < batch; i++)
      for (int64_t h = 0; scores != NULL && h < KV_HEADS; h++) {
        const int64_t at = i * strides[6] + h * strides[7], last = lengths[i];
        const float *new_key = key + i * strides[2] + h * strides[3];
        const float *new_value = value + i * strides[4] + h * strides[5];
        for (int x = 0; x < DIM; x++) {
          keys[at + last * DIM + x] = narrow(new_key[x]);
          values[at + last * DIM + x] = narrow(new_value[x]);
        }
        const int64_t first = window > 0 && last + 1 > window ? last + 1 - window : 0;
        attend(query + i * strides[0] + h * GROUP * strides[1], strides[1], keys + at, values + at, first, last, scaling,
               scores, num_tokens, out + (i * KV_HEADS + h) * GROUP * DIM);
      }
    free(scores);
  }
  return failed;
}
