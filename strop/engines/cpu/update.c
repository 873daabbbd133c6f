/* Layers of an update for a CPU, forward and backward: attention of packed segments, root-mean-square norms, rotary
 * positions, the gate of a feed-forward part.
 *
 * A `cell` is a number of hidden states, queries, keys, values and their gradients: of bfloat16 with BF16, else of float.
 * All that is computed with it is float, and rounded where it is written down.
 *
 * attend, attend_back: queries of a segment over the keys of those that it continues and its own, read where they lie.
 * Scores are held transposed, [keys, rows]: a vector has one key's scores of LANES rows, a row being a query of one of
 * the `group` heads that share the keys, so nothing is summed across a vector, and a product reads keys and values as
 * they are. A block of scores stays in the cache; none outlives it.
 *
 * Given how a sequence is cut into runs, what becomes of a token depends neither on other sequences nor on the number of
 * threads: every sum is made in an order of its own. Blocks of keys begin anew at each run, so a sequence whose beginning
 * is a run of its own, as one that others share, has other last digits than the same one in a single run. Compiled
 * without -ffast-math: a number that is none stays one.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tiles.h"

#define QUERIES (4 * LANES) /* rows of a block of scores */
#define KEYS 256            /* and its keys */
#define HIDDEN -1e30f       /* score of a key that is not seen */

/* The tensors of a layer; steps are of tokens and heads, in numbers. */
struct layer {
  const cell *query, *key, *value, *out, *grad;
  cell *result;
  float *normalizers;
  cell *grad_query;
  float *grad_key, *grad_value; /* are added to */
  int64_t query_steps[2], key_steps[2], value_steps[2], grad_steps[2];
  int64_t key_heads, group, dim, value_dim, window; /* window: keys that a query sees; 0: all */
  float scaling;
};

/* A segment continues runs of the row, of which `spans` has the first and the end; the last run is its own tokens. */
struct segment {
  int64_t start, length, before, first_span, num_spans;
};

/* Rows of a block: queries [from, from + count) of a segment, each with the heads of one key head. */
struct block {
  const struct layer *layer;
  const struct segment *segment;
  int64_t head, from, count, rows, width; /* width: rows and padding */
};

/* Some numbers of each row of a block, as rows [rows, dim] and as columns [dim, width]; padding is 0. */
static void pack(const struct block *block, const cell *from, const int64_t *steps, int64_t dim, float factor, float *rows,
                 float *columns) {
  const int64_t group = block->layer->group, width = block->width;
  float *row = rows;
  for (int64_t q = 0; q < block->count; q++) {
    const cell *token = from + (block->segment->start + block->from + q) * steps[0] + block->head * group * steps[1];
    for (int64_t g = 0; g < group; g++, row += dim)
      for (int64_t x = 0; x < dim; x += LANES) store(row + x, load_cells(token + g * steps[1] + x) * factor);
  }
  memset(row, 0, sizeof(float) * (width - block->rows) * dim);
  for (int64_t r = 0; r < width; r += LANES)
    for (int64_t x = 0; x < dim; x += LANES) transpose(rows + r * dim + x, dim, columns + x * width + r, width);
}

/* Rows [count, dim] of cells, `step` apart, as numbers that are `row` apart: where they lie, or copied into space. */
static inline const float *numbers_of(const cell *from, int64_t step, int64_t count, int64_t dim, float *space, int64_t *row) {
#ifdef BF16
  for (int64_t t = 0; t < count; t++)
    for (int64_t x = 0; x < dim; x += LANES) store(space + t * dim + x, load_cells(from + t * step + x));
  *row = dim;
  return space;
#else
  *row = step;
  return from;
#endif
}

/* Place of the query of each row in its sequence, [width]. */
static void find_places(const struct block *block, int32_t *places) {
  const int64_t first = block->segment->before + block->from, group = block->layer->group;
  for (int64_t q = 0; q * group < block->width; q++)
    for (int64_t g = 0; g < group && q * group + g < block->width; g++) places[q * group + g] = first + q;
}

/* Where the rows of a query of a block begin in a tensor [tokens, heads]; those of its heads follow one another. */
static inline int64_t first_row(const struct block *block, int64_t query) {
  const struct layer *l = block->layer;
  return ((block->segment->start + block->from + query) * l->key_heads + block->head) * l->group;
}

/* Scores [count, width] of keys that are not seen are hidden; `from` is the place of the first key in its sequence. */
static void hide(const struct block *block, const int32_t *places, float *scores, int64_t from, int64_t count) {
  const int64_t first = block->segment->before + block->from, window = block->layer->window;
  const int is_all_seen = from + count - 1 <= first && (!window || from > first + block->count - 1 - window);
  if (is_all_seen) return;
  const int32_t far = window ? window : INT32_MAX;
  for (int64_t t = 0; t < count; t++)
    for (int64_t r = 0; r < block->width; r += LANES) {
      const ints before = *(const ints *)(places + r) - (int32_t)(from + t);
      float *at = scores + t * block->width + r;
      store(at, pick((before < 0) | (before >= far), all(HIDDEN), load(at)));
    }
}

/* Keys of one run of the row, at most KEYS of them: the index of the first one, and its place in the sequence. */
struct keys {
  int64_t start, place, count, span, end;
};

/* The next keys that some query of a block sees; 0 where there are none left. Begin with zeros, and span -1. */
static int next_keys(struct keys *keys, const struct block *block, const int64_t *spans) {
  const struct segment *segment = block->segment;
  const int64_t first = segment->before + block->from, end = first + block->count, window = block->layer->window;
  do {
    keys->start += keys->count, keys->place += keys->count, keys->count = 0;
    if (keys->place >= end) return 0;
    if (keys->start == keys->end) { /* on to the next run: the last is the segment itself */
      if (++keys->span > segment->num_spans) return 0;
      const int64_t own[2] = {segment->start, segment->start + segment->length};
      const int64_t *run = keys->span < segment->num_spans ? spans + 2 * (segment->first_span + keys->span) : own;
      keys->start = run[0], keys->end = run[1];
    }
    keys->count = keys->end - keys->start;
    if (keys->count > KEYS) keys->count = KEYS;
    if (keys->count > end - keys->place) keys->count = end - keys->place;
  } while (window && keys->place + keys->count <= first - window + 1);
  return 1;
}

/* Keys or values of a head, [count, dim], `row` numbers apart; space is for KEYS of them. */
static const float *keys_at(const struct layer *l, const struct keys *keys, int64_t head, float *space, int64_t *row) {
  return numbers_of(l->key + keys->start * l->key_steps[0] + head * l->key_steps[1], l->key_steps[0], keys->count, l->dim, space,
                    row);
}
static const float *values_at(const struct layer *l, const struct keys *keys, int64_t head, float *space, int64_t *row) {
  return numbers_of(l->value + keys->start * l->value_steps[0] + head * l->value_steps[1], l->value_steps[0], keys->count,
                    l->value_dim, space, row);
}

static int64_t round_up(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

static struct block block_of(const struct layer *layer, const struct segment *segment, int64_t head, int64_t from, int64_t end) {
  const int64_t most = QUERIES / layer->group, count = end - from < most ? end - from : most;
  return (struct block){layer, segment, head, from, count, count * layer->group, round_up(count * layer->group)};
}

static int64_t room_of_keys(const struct layer *layer) { return KEYS * (layer->dim + layer->value_dim); }

/* Numbers that a thread of `attend` works in. */
static int64_t room(const struct layer *layer) { return QUERIES * (KEYS + 2 * layer->dim + layer->value_dim + 3) + room_of_keys(layer); }

/* Output and normalizers of a block; the largest score and the sum of each row are mended from block to block of keys. */
static void attend_block(const struct block *block, const int64_t *spans, float *space) {
  const struct layer *l = block->layer;
  const int64_t width = block->width, dim = l->dim, value_dim = l->value_dim;
  float *scores = space, *rows = scores + QUERIES * KEYS, *columns = rows + QUERIES * dim, *sums = columns + QUERIES * dim;
  float *largest = sums + QUERIES * value_dim, *total = largest + QUERIES;
  int32_t *places = (int32_t *)(total + QUERIES);
  float *keys_space = total + 2 * QUERIES, *values_space = keys_space + KEYS * dim;
  find_places(block, places);
  pack(block, l->query, l->query_steps, dim, l->scaling, rows, columns);
  memset(sums, 0, sizeof(float) * width * value_dim);
  for (int64_t r = 0; r < width; r++) largest[r] = HIDDEN, total[r] = 0;
  for (struct keys keys = {.span = -1}; next_keys(&keys, block, spans);) {
    const int64_t count = keys.count;
    int64_t key_row, value_row;
    const float *key = keys_at(l, &keys, block->head, keys_space, &key_row);
    const float *value = values_at(l, &keys, block->head, values_space, &value_row);
    product(count, width, dim, key, key_row, 1, columns, width, scores, width, 0);
    hide(block, places, scores, keys.place, count);
    for (int64_t r = 0; r < width; r += LANES) {
      vec most = load(largest + r), sum = {0};
      for (int64_t t = 0; t < count; t++) most = larger(load(scores + t * width + r), most);
      const vec less = exponential(load(largest + r) - most);
      for (int64_t t = 0; t < count; t++) {
        const vec weight = exponential(load(scores + t * width + r) - most);
        store(scores + t * width + r, weight);
        sum += weight;
      }
      store(total + r, load(total + r) * less + sum);
      store(largest + r, most);
      for (int x = 0; x < LANES; x++)
        if (less[x] != 1.0f)
          for (int64_t d = 0; d < value_dim; d += LANES) {
            float *at = sums + (r + x) * value_dim + d;
            store(at, load(at) * less[x]);
          }
    }
    product(block->rows, value_dim, count, scores, 1, width, value, value_row, sums, value_dim, 1);
  }
  for (int64_t r = 0, q = 0; q < block->count; q++)
    for (int64_t at = first_row(block, q), end = at + l->group; at < end; at++, r++) {
      const float factor = 1 / total[r];
      for (int64_t d = 0; d < value_dim; d += LANES)
        store_cells(l->result + at * value_dim + d, load(sums + r * value_dim + d) * factor);
      l->normalizers[at] = largest[r] + logf(total[r]);
    }
}

/* tasks [num_tasks, 3]: a segment, and the first and the end of some of its queries. 1: there is no memory. */
int attend(const struct layer *layer, const struct segment *segments, const int64_t *spans, const int64_t *tasks,
           int64_t num_tasks, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    float *space = malloc(sizeof(float) * room(layer));
    if (!space) failed = 1;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t task = 0; task < num_tasks; task++)
      for (int64_t head = 0; head < layer->key_heads; head++) {
        if (!space) continue;
        const int64_t *at = tasks + 3 * task;
        for (int64_t from = at[1]; from < at[2];) {
          const struct block block = block_of(layer, segments + at[0], head, from, at[2]);
          attend_block(&block, spans, space);
          from += block.count;
        }
      }
    free(space);
  }
  return failed;
}

static int64_t room_back(const struct layer *layer) {
  return QUERIES * (2 * KEYS + 3 * layer->dim + 2 * layer->value_dim + 3) + room_of_keys(layer);
}

/* Gradients of a block: those of queries are written, those of keys and values added. */
static void attend_block_back(const struct block *block, const int64_t *spans, float *space) {
  const struct layer *l = block->layer;
  const int64_t width = block->width, dim = l->dim, value_dim = l->value_dim;
  float *weights = space, *grads = weights + QUERIES * KEYS, *rows = grads + QUERIES * KEYS, *columns = rows + QUERIES * dim;
  float *sums = columns + QUERIES * dim, *grad_rows = sums + QUERIES * dim, *grad_columns = grad_rows + QUERIES * value_dim;
  float *normalizers = grad_columns + QUERIES * value_dim, *means = normalizers + QUERIES;
  int32_t *places = (int32_t *)(means + QUERIES);
  float *keys_space = means + 2 * QUERIES, *values_space = keys_space + KEYS * dim;
  find_places(block, places);
  pack(block, l->query, l->query_steps, dim, l->scaling, rows, columns);
  pack(block, l->grad, l->grad_steps, value_dim, 1, grad_rows, grad_columns);
  memset(sums, 0, sizeof(float) * width * dim);
  memset(normalizers, 0, sizeof(float) * 2 * QUERIES); /* and means: of padding */
  for (int64_t r = 0, q = 0; q < block->count; q++)
    for (int64_t at = first_row(block, q), end = at + l->group; at < end; at++, r++) {
      vec mean = {0};
      for (int64_t d = 0; d < value_dim; d += LANES)
        mean += load(grad_rows + r * value_dim + d) * load_cells(l->out + at * value_dim + d);
      for (int x = 0; x < LANES; x++) means[r] += mean[x];
      normalizers[r] = l->normalizers[at];
    }
  for (struct keys keys = {.span = -1}; next_keys(&keys, block, spans);) {
    const int64_t count = keys.count;
    int64_t key_row, value_row;
    const float *key = keys_at(l, &keys, block->head, keys_space, &key_row);
    const float *value = values_at(l, &keys, block->head, values_space, &value_row);
    product(count, width, dim, key, key_row, 1, columns, width, weights, width, 0);
    hide(block, places, weights, keys.place, count);
    product(count, width, value_dim, value, value_row, 1, grad_columns, width, grads, width, 0);
    for (int64_t t = 0; t < count; t++)
      for (int64_t r = 0; r < width; r += LANES) {
        const vec weight = exponential(load(weights + t * width + r) - load(normalizers + r));
        store(weights + t * width + r, weight);
        store(grads + t * width + r, weight * (load(grads + t * width + r) - load(means + r)));
      }
    product(count, value_dim, block->rows, weights, width, 1, grad_rows, value_dim,
            l->grad_value + (keys.start * l->key_heads + block->head) * value_dim, l->key_heads * value_dim, 1);
    product(count, dim, block->rows, grads, width, 1, rows, dim, l->grad_key + (keys.start * l->key_heads + block->head) * dim,
            l->key_heads * dim, 1);
    product(block->rows, dim, count, grads, 1, width, key, key_row, sums, dim, 1);
  }
  for (int64_t r = 0, q = 0; q < block->count; q++)
    for (int64_t at = first_row(block, q), end = at + l->group; at < end; at++, r++)
      for (int64_t d = 0; d < dim; d += LANES)
        store_cells(l->grad_query + at * dim + d, load(sums + r * dim + d) * l->scaling);
}

/* trees [num_trees, 2]: first and end of segments that share keys with each other alone. 1: there is no memory. */
int attend_back(const struct layer *layer, const struct segment *segments, const int64_t *spans, const int64_t *trees,
                int64_t num_trees, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    float *space = malloc(sizeof(float) * room_back(layer));
    if (!space) failed = 1;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t tree = 0; tree < num_trees; tree++)
      for (int64_t head = 0; head < layer->key_heads; head++) {
        if (!space) continue;
        for (int64_t at = trees[2 * tree]; at < trees[2 * tree + 1]; at++)
          for (int64_t from = 0; from < segments[at].length;) {
            const struct block block = block_of(layer, segments + at, head, from, segments[at].length);
            attend_block_back(&block, spans, space);
            from += block.count;
          }
      }
    free(space);
  }
  return failed;
}

/* out, factors: x [rows, dim] / sqrt(mean(x^2) + eps) times the weight, and what each row was multiplied by. */
void norm(const cell *x, const float *weight, cell *out, float *factors, int64_t rows, int64_t dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    const cell *from = x + r * dim;
    cell *to = out + r * dim;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t d = 0; d < dim; d++) squares += wide(from[d]) * wide(from[d]);
    const float factor = 1 / sqrtf(squares / dim + eps);
    factors[r] = factor;
#pragma omp simd
    for (int64_t d = 0; d < dim; d++) to[d] = narrow(wide(from[d]) * factor * weight[d]);
  }
}

#define NORM_ROWS 256 /* that are summed up in float */
int64_t norm_parts(int64_t rows) { return (rows + NORM_ROWS - 1) / NORM_ROWS; }

/* grad_x [rows, dim], and grad_weight [dim], in double from parts [norm_parts(rows), dim]. */
void norm_back(const cell *grad, const cell *x, const float *weight, const float *factors, cell *grad_x, float *grad_weight,
               float *parts, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < norm_parts(rows); part++) {
    float *sums = parts + part * dim;
    memset(sums, 0, sizeof(float) * dim);
    for (int64_t r = part * NORM_ROWS; r < rows && r < (part + 1) * NORM_ROWS; r++) {
      const cell *of_row = grad + r * dim, *from = x + r * dim;
      cell *to = grad_x + r * dim;
      float along = 0;
      const float factor = factors[r];
#pragma omp simd reduction(+ : along)
      for (int64_t d = 0; d < dim; d++) along += wide(of_row[d]) * weight[d] * wide(from[d]);
      along *= factor * factor / dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; d++) {
        const float g = wide(of_row[d]), number = wide(from[d]);
        to[d] = narrow(factor * (g * weight[d] - number * along));
        sums[d] += g * (number * factor);
      }
    }
  }
  for (int64_t d = 0; d < dim; d++) {
    double sum = 0;
    for (int64_t part = 0; part < norm_parts(rows); part++) sum += parts[part * dim + d];
    grad_weight[d] = sum;
  }
}

/* out [tokens, heads, dim]: the halves of each head turned by the angles of its token [tokens, dim]; back: turned back. */
void turn(const cell *states, int64_t head_step, int64_t token_step, const float *cosines, const float *sines, cell *out,
          int64_t tokens, int64_t heads, int64_t dim, int back, int threads) {
  const int64_t half = dim / 2;
  const float sign = back ? -1 : 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t token = 0; token < tokens; token++) {
    const float *cos = cosines + token * dim, *sin = sines + token * dim;
    const float *of_left = sin + (back ? half : 0), *of_right = sin + (back ? 0 : half);
    for (int64_t head = 0; head < heads; head++) {
      const cell *from = states + head * head_step + token * token_step;
      cell *to = out + (token * heads + head) * dim;
#pragma omp simd
      for (int64_t d = 0; d < half; d++) {
        const float left = wide(from[d]), right = wide(from[half + d]);
        to[d] = narrow(left * cos[d] - sign * right * of_left[d]);
        to[half + d] = narrow(right * cos[half + d] + sign * left * of_right[d]);
      }
    }
  }
}

#define GATE_PART 4096 /* numbers that a thread takes at a time */

/* The part of a vector that is there; `count` numbers, the others 0. */
static inline vec some(const cell *from, int64_t count) {
  if (count >= LANES) return load_cells(from);
  cell numbers[LANES] = {0};
  memcpy(numbers, from, sizeof(cell) * count);
  return load_cells(numbers);
}
static inline void put(cell *to, vec x, int64_t count) {
  if (count >= LANES) {
    store_cells(to, x);
    return;
  }
  cell numbers[LANES];
  store_cells(numbers, x);
  memcpy(to, numbers, sizeof(cell) * count);
}

/* out = gate sigmoid(gate) times up, of `size` numbers. */
void gate(const cell *gates, const cell *ups, cell *out, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < size; part += GATE_PART)
    for (int64_t i = part; i < size && i < part + GATE_PART; i += LANES) {
      const vec x = some(gates + i, size - i);
      put(out + i, x * sigmoid(x) * some(ups + i, size - i), size - i);
    }
}

void gate_back(const cell *grad, const cell *gates, const cell *ups, cell *grad_gates, cell *grad_ups, int64_t size,
               int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < size; part += GATE_PART)
    for (int64_t i = part; i < size && i < part + GATE_PART; i += LANES) {
      const vec x = some(gates + i, size - i), of_out = some(grad + i, size - i), share = sigmoid(x);
      put(grad_gates + i, of_out * some(ups + i, size - i) * share * (1 + x * (1 - share)), size - i);
      put(grad_ups + i, of_out * x * share, size - i);
    }
}
