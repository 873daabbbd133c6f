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
#include "decode_attention.h"
#include "packed_products.h"

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
                       struct token token, int64_t h, given *out, int64_t stride, float *scores) {
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
  give_all(out, attended, GROUP * DIM);
}

/* stream [batch, size] += added (none where it is NULL); its root-mean-square norm times weight goes to `out`, and to `last`
 * alone where that is not NULL. */
static void add_norm(float *stream, const cell *added, const float *weight, float eps, given *out, float *last,
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
      for (int64_t x = 0; x < size; x++) out[i * size + x] = given_of(row[x] * factor * weight[x]);
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
  given *normed = (given *)(last + num_ends * size), *attended = normed + count * size, *gated = attended + count * heads;
  cell *rows = (cell *)(gated + count * inner), *added = rows + count * rows_size;
#pragma omp parallel num_threads(num_threads)
  {
    float *scores = room + omp_get_thread_num() * GROUP * stride, *now = stream;
    int64_t num_rows = count;
    add_norm(now, NULL, first_norm, layers[0].eps, normed, NULL, count, size);
    for (int64_t number = 0; number < num_layers; number++) {
      const struct layer *layer = layers + number;
      const int is_last = number == num_layers - 1;
      product(normed, layer->qkv, layer->qkv_bias, rows, NULL, count, size, rows_size);
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
      product(attended, layer->out, layer->out_bias, added, NULL, num_rows, heads, size);
      add_norm(now, added, layer->next_norm, layer->eps, normed, NULL, num_rows, size);
      product(normed, layer->gate_up, layer->gate_up_bias, NULL, gated, num_rows, size, inner);
      product(gated, layer->down, layer->down_bias, added, NULL, num_rows, inner, size);
      add_norm(now, added, layer->next_layer_norm, layer->eps, normed, is_last ? out : NULL, num_rows, size);
    }
  }
}
