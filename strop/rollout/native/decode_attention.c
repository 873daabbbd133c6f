/* What a decode step does between matrix products.
 *
 * decode: attention of one new token per sequence over the keys and values of its own slot, which the token enters
 * first; reads each sequence to its own length, and everything once for all query heads of a key head. decode_layer:
 * the same from the output of the joined projections, with norms and rotary positions. add_norm and silu_mul: the rest
 * of a layer (fused.py).
 *
 * Compiled by kernel.py with DIM (numbers per head), KV_HEADS, GROUP (query heads of each key head), and BF16 where the
 * cache and the inputs of matrix products are bfloat16; a `cell` is a number of those.
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

/* One head of a new token: norm (none where `weight` is NULL), then rotary position. */
static void turned(const cell *from, const float *weight, float eps, const float *cosine, const float *sine,
                   float *restrict out) {
  float row[DIM];
  for (int x = 0; x < DIM; x++) row[x] = wide(from[x]);
  if (weight != NULL) {
    float total = 0;
    for (int x = 0; x < DIM; x++) total += row[x] * row[x];
    const float factor = 1 / sqrtf(total / DIM + eps);
    for (int x = 0; x < DIM; x++) row[x] *= factor * weight[x];
  }
  for (int x = 0; x < DIM / 2; x++) {
    out[x] = row[x] * cosine[x] - row[x + DIM / 2] * sine[x];
    out[x + DIM / 2] = row[x + DIM / 2] * cosine[x + DIM / 2] + row[x] * sine[x + DIM / 2];
  }
}

/* As decode, from queries, keys and values side by side in rows [batch, (KV_HEADS * GROUP + 2 * KV_HEADS) * DIM], with
 * tables of cosines and sines [positions, DIM]; a token's position is the length of its slot. out [batch, KV_HEADS * GROUP
 * * DIM]. strides: from slot to slot and from head to head of the cache. */
int decode_layer(const cell *rows, const float *query_norm, const float *key_norm, float eps, const float *cosines,
                 const float *sines, cell *out, cell *keys, cell *values, const int64_t *lengths, int64_t batch,
                 int64_t num_tokens, const int64_t *strides, float scaling, int64_t window, int num_threads) {
  const int heads = KV_HEADS * GROUP;
  int failed = 0;
#pragma omp parallel num_threads(num_threads) reduction(| : failed)
  {
    float *scores = malloc(sizeof(float) * GROUP * num_tokens);
    failed |= scores == NULL;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < batch; i++)
      for (int64_t h = 0; scores != NULL && h < KV_HEADS; h++) {
        const int64_t at = i * strides[0] + h * strides[1], last = lengths[i];
        const cell *row = rows + i * (heads + 2 * KV_HEADS) * DIM;
        const float *cosine = cosines + last * DIM, *sine = sines + last * DIM;
        float query[GROUP][DIM], key[DIM], attended[GROUP][DIM];
        turned(row + (heads + h) * DIM, key_norm, eps, cosine, sine, key);
        for (int r = 0; r < GROUP; r++) turned(row + (h * GROUP + r) * DIM, query_norm, eps, cosine, sine, query[r]);
        for (int x = 0; x < DIM; x++) {
          keys[at + last * DIM + x] = narrow(key[x]);
          values[at + last * DIM + x] = row[(heads + KV_HEADS + h) * DIM + x];
        }
        const int64_t first = window > 0 && last + 1 > window ? last + 1 - window : 0;
        attend(query[0], DIM, keys + at, values + at, first, last, scaling, scores, num_tokens, attended[0]);
        cell *into = out + (i * heads + h * GROUP) * DIM;
        for (int r = 0; r < GROUP; r++)
          for (int x = 0; x < DIM; x++) into[r * DIM + x] = narrow(attended[r][x]);
      }
    free(scores);
  }
  return failed;
}

/* stream [batch, size] += added (none where it is NULL); its root-mean-square norm times weight goes to out, or to
 * wide_out where that is given. */
void add_norm(float *stream, const cell *added, const float *weight, float eps, cell *out, float *wide_out, int64_t batch,
              int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t i = 0; i < batch; i++) {
    float *restrict row = stream + i * size, total = 0;
    if (added != NULL)
      for (int64_t x = 0; x < size; x++) row[x] += wide(added[i * size + x]);
    for (int64_t x = 0; x < size; x++) total += row[x] * row[x];
    const float factor = 1 / sqrtf(total / size + eps);
    if (wide_out != NULL)
      for (int64_t x = 0; x < size; x++) wide_out[i * size + x] = row[x] * factor * weight[x];
    else
      for (int64_t x = 0; x < size; x++) out[i * size + x] = narrow(row[x] * factor * weight[x]);
  }
}

/* out [batch, size] = silu(gate) * up, which lie side by side in rows [batch, 2 * size]. */
void silu_mul(const cell *rows, cell *out, int64_t batch, int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t i = 0; i < batch; i++) {
    const cell *gate = rows + 2 * i * size, *up = gate + size;
    for (int64_t x = 0; x < size; x++) {
      const float g = wide(gate[x]);
      out[i * size + x] = narrow(g / (1 + expf(-g)) * wide(up[x]));
    }
  }
}
