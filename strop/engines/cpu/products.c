/* Products of linear layers in float for a CPU, forward and backward, all of a gated feed-forward part, and the square of
 * a gradient.
 *
 * Every sum of a product is made in the order of what is summed, number by number, however the work is cut and shared
 * out: what becomes of a token depends neither on those beside it nor on the number of threads. Sizes of weights are
 * multiples of LANES. Compiled without -ffast-math: a number that is none stays one.
 */
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tiles.h"

#define WIDTH (COLUMNS * LANES) /* columns of a panel of a weight, which is copied to lie in one piece */
#define DEPTH 512               /* and its rows: 128 KiB, with 8 lanes 32, which stay in the cache */
#define TOGETHER 256            /* tokens whose products are added in registers: their inputs stay in the cache */
#define CHUNK 504               /* tokens whose inner states are held, at most: a multiple of ROWS */
#define STRIPS (8 * ROWS)       /* rows of a gradient by a weight that a thread takes at a time */
#define BY_COLUMNS 1
#define BY_ROWS 0

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* out [rows, LANES] (+)= x [rows, depth] times LANES columns of a weight, which has them as its rows: a tile whose right
 * side is turned on the way, in the same order of sums. */
static inline __attribute__((always_inline)) void turned_tile(int rows, int64_t depth, const float *restrict x, int64_t x_row,
                                                              const float *restrict weight, int64_t weight_row,
                                                              float *restrict out, int64_t out_row, int adds) {
  vec sums[ROWS];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) sums[r] = adds ? load(out + r * out_row) : (vec){0};
  for (int64_t k = 0; k < depth; k += LANES) {
    vec right[LANES];
    turned(weight + k, weight_row, right);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) sums[r] += x[r * x_row + k + i] * right[i];
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) store(out + r * out_row, sums[r]);
}

#define TURNED(rows) \
  case rows: \
    turned_tile(rows, depth, x, x_row, weight + j * weight_row, weight_row, out + j, out_row, adds); \
    break;

/* As `panel`, of at most ROWS rows, for which a copy would cost as much as the product. */
static void few(int64_t rows, int64_t width, int64_t depth, const float *x, int64_t x_row, const float *weight,
                int64_t weight_row, int order, float *out, int64_t out_row, int adds) {
  if (order == BY_ROWS) return product(rows, width, depth, x, x_row, 1, weight, weight_row, out, out_row, adds);
  for (int64_t j = 0; j < width; j += LANES) switch (rows) { TURNED(1) TURNED(2) TURNED(3) TURNED(4) TURNED(5) TURNED(6) }
}

/* out [rows, width] (+)= x [rows, depth] times a panel [depth, width] of a weight, which has it by rows or by columns. */
static void panel(int64_t rows, int64_t width, int64_t depth, const float *x, int64_t x_row, const float *weight,
                  int64_t weight_row, int order, float *out, int64_t out_row, int adds) {
  if (rows <= ROWS) return few(rows, width, depth, x, x_row, weight, weight_row, order, out, out_row, adds);
  float copy[DEPTH * WIDTH];
  for (int64_t from = 0; from < depth; from += DEPTH) {
    const int64_t some = least(DEPTH, depth - from);
    if (order == BY_COLUMNS)
      for (int64_t j = 0; j < width; j += LANES)
        for (int64_t i = 0; i < some; i += LANES) transpose(weight + j * weight_row + from + i, weight_row, copy + i * WIDTH + j, WIDTH);
    else
      for (int64_t i = 0; i < some; i++)
        for (int64_t j = 0; j < width; j += LANES) store(copy + i * WIDTH + j, load(weight + (from + i) * weight_row + j));
    product(rows, width, some, x + from, x_row, 1, copy, WIDTH, out, out_row, adds || from);
  }
}

/* Rows that a thread takes at a time beside a panel: as many as keep all threads busy. */
static int64_t rows_at_a_time(int64_t rows, int64_t width, int threads) {
  const int64_t panels = (width + WIDTH - 1) / WIDTH, parts = (3 * threads + panels - 1) / panels;
  const int64_t some = (rows + parts - 1) / parts;
  return some < STRIPS ? STRIPS : (some + ROWS - 1) / ROWS * ROWS;
}

/* out [m, n] = inputs [m, k] times weight [n, k] transposed, plus bias [n], which may be NULL. */
void linear(const float *inputs, const float *weight, const float *bias, float *out, int64_t m, int64_t n, int64_t k,
            int threads) {
  const int64_t part = rows_at_a_time(m, n, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) collapse(2)
  for (int64_t i = 0; i < m; i += part)
    for (int64_t j = 0; j < n; j += WIDTH) {
      const int64_t rows = least(part, m - i), width = least(WIDTH, n - j);
      if (bias)
        for (int64_t r = i; r < i + rows; r++) memcpy(out + r * n + j, bias + j, sizeof(float) * width);
      panel(rows, width, k, inputs + i * k, k, weight + j * k, k, BY_COLUMNS, out + i * n + j, n, bias != NULL);
    }
}

/* out [m, k] = grad [m, n] times weight [n, k]. */
void linear_back(const float *grad, const float *weight, float *out, int64_t m, int64_t n, int64_t k, int threads) {
  const int64_t part = rows_at_a_time(m, k, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) collapse(2)
  for (int64_t i = 0; i < m; i += part)
    for (int64_t j = 0; j < k; j += WIDTH)
      panel(least(part, m - i), least(WIDTH, k - j), n, grad + i * n, n, weight + j, k, BY_ROWS, out + i * k + j, k, 0);
}

/* Some rows [from, from + count) of out [n, k] (+)= grad [m, n] transposed times inputs [m, k]. */
static void add_gradient(int64_t from, int64_t count, int64_t k, int64_t m, const float *grad, int64_t grad_row,
                         const float *inputs, int64_t inputs_row, float *out, int adds) {
  for (int64_t t = 0; t < m; t += TOGETHER)
    product(count, k, least(TOGETHER, m - t), grad + t * grad_row + from, 1, grad_row, inputs + t * inputs_row, inputs_row,
            out + from * k, k, adds || t);
}

/* out [n, k] (+)= grad [m, n] transposed times inputs [m, k]; n is of any size. */
void weight_gradient(const float *grad, const float *inputs, float *out, int64_t m, int64_t n, int64_t k, int adds, int threads) {
  if (!m && !adds) memset(out, 0, sizeof(float) * n * k);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t from = 0; from < n; from += STRIPS)
    add_gradient(from, least(STRIPS, n - from), k, m, grad, n, inputs, k, out, adds);
}

/* A gated feed-forward part of `tokens` hidden states [dim] with weights gate, up [inner, dim] and down [dim, inner]:
 * down(act(gate x) * (up x)), with act(x) = x sigmoid(x). What is NULL is neither kept nor computed. */
struct part {
  const float *hidden, *gate, *up, *down;
  float *gates, *ups, *out; /* gate x and up x [tokens, inner], and the result [tokens, dim] */
  const float *grad;
  float *grad_hidden, *grad_gate, *grad_up, *grad_down;
  int64_t tokens, dim, inner;
};

/* Tokens of a chunk: all are of one size, as short ones pay more for the copies of panels. */
static int64_t chunk_of(int64_t tokens) {
  const int64_t count = (tokens + CHUNK - 1) / CHUNK, some = count ? (tokens + count - 1) / count : 1;
  return (some + ROWS - 1) / ROWS * ROWS;
}

/* Rows of inner states lie so that the same column of many of them has a place in the cache. */
static int64_t room(const struct part *p) { return p->inner + LANES; }
static float *inner_states(const struct part *p, int64_t count, int64_t chunk) {
  return aligned_alloc(64, (sizeof(float) * count * chunk * room(p) + 63) / 64 * 64);
}

/* 1: there is no memory. */
int feed_forward(const struct part *p, int threads) {
  const int64_t dim = p->dim, inner = p->inner, row = room(p), chunk = chunk_of(p->tokens);
  float *states = inner_states(p, 3, chunk);
  if (!states) return 1;
  float *acts = states + 2 * chunk * row;
#pragma omp parallel num_threads(threads)
  for (int64_t first = 0; first < p->tokens; first += chunk) {
    const int64_t tokens = least(chunk, p->tokens - first), outer_part = rows_at_a_time(tokens, dim, threads);
    const int64_t part = rows_at_a_time(tokens, inner, threads), kept = p->gates ? inner : row;
    float *gates = p->gates ? p->gates + first * inner : states, *ups = p->ups ? p->ups + first * inner : states + chunk * row;
    const float *hidden = p->hidden + first * dim;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < tokens; i += part)
      for (int64_t j = 0; j < inner; j += WIDTH) {
        const int64_t rows = least(part, tokens - i), width = least(WIDTH, inner - j);
        panel(rows, width, dim, hidden + i * dim, dim, p->gate + j * dim, dim, BY_COLUMNS, gates + i * kept + j, kept, 0);
        panel(rows, width, dim, hidden + i * dim, dim, p->up + j * dim, dim, BY_COLUMNS, ups + i * kept + j, kept, 0);
        for (int64_t r = i; r < i + rows; r++)
          for (int64_t x = j; x < j + width; x += LANES) {
            const vec gate = load(gates + r * kept + x);
            store(acts + r * row + x, gate * sigmoid(gate) * load(ups + r * kept + x));
          }
      }
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < tokens; i += outer_part)
      for (int64_t j = 0; j < dim; j += WIDTH)
        panel(least(outer_part, tokens - i), least(WIDTH, dim - j), inner, acts + i * row, row, p->down + j * inner, inner,
              BY_COLUMNS, p->out + (first + i) * dim + j, dim, 0);
  }
  free(states);
  return 0;
}

/* The gradients by hidden states and weights, of `grad` [tokens, dim] by the result. 1: there is no memory. */
int feed_forward_back(const struct part *p, int threads) {
  const int64_t dim = p->dim, inner = p->inner, row = room(p), chunk = chunk_of(p->tokens);
  float *of_gates = inner_states(p, 3, chunk);
  if (!of_gates) return 1;
  float *of_ups = of_gates + chunk * row, *acts = of_ups + chunk * row;
#pragma omp parallel num_threads(threads)
  for (int64_t first = 0; first < p->tokens; first += chunk) {
    const int64_t tokens = least(chunk, p->tokens - first), outer_part = rows_at_a_time(tokens, dim, threads);
    const int64_t part = rows_at_a_time(tokens, inner, threads);
    const float *grad = p->grad + first * dim, *hidden = p->hidden + first * dim;
    const float *gates = p->gates + first * inner, *ups = p->ups + first * inner;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < tokens; i += part)
      for (int64_t j = 0; j < inner; j += WIDTH) {
        const int64_t rows = least(part, tokens - i), width = least(WIDTH, inner - j);
        panel(rows, width, dim, grad + i * dim, dim, p->down + j, inner, BY_ROWS, acts + i * row + j, row, 0);
        for (int64_t r = i; r < i + rows; r++)
          for (int64_t x = j; x < j + width; x += LANES) {
            const vec gate = load(gates + r * inner + x), up = load(ups + r * inner + x), of_act = load(acts + r * row + x);
            const vec share = sigmoid(gate), act = gate * share;
            store(of_gates + r * row + x, of_act * up * share * (1 + gate * (1 - share)));
            store(of_ups + r * row + x, of_act * act);
            store(acts + r * row + x, act * up);
          }
      }
    if (p->grad_hidden)
#pragma omp for schedule(dynamic, 1) collapse(2) nowait
      for (int64_t i = 0; i < tokens; i += outer_part)
        for (int64_t j = 0; j < dim; j += WIDTH) {
          const int64_t rows = least(outer_part, tokens - i), width = least(WIDTH, dim - j);
          float *out = p->grad_hidden + (first + i) * dim + j;
          panel(rows, width, inner, of_gates + i * row, row, p->gate + j, dim, BY_ROWS, out, dim, 0);
          panel(rows, width, inner, of_ups + i * row, row, p->up + j, dim, BY_ROWS, out, dim, 1);
        }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t from = 0; from < inner; from += STRIPS) {
      const int64_t count = least(STRIPS, inner - from);
      if (p->grad_gate) add_gradient(from, count, dim, tokens, of_gates, row, hidden, dim, p->grad_gate, first > 0);
      if (p->grad_up) add_gradient(from, count, dim, tokens, of_ups, row, hidden, dim, p->grad_up, first > 0);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t from = 0; from < (p->grad_down ? dim : 0); from += STRIPS)
      add_gradient(from, least(STRIPS, dim - from), inner, tokens, grad, dim, acts, row, p->grad_down, first > 0);
  }
  free(of_gates);
  return 0;
}

#define PARTS 256 /* of a tensor, at most, whose sums are added in order */

/* Sum of the squares of `size` numbers, in double. */
double sum_of_squares(const float *numbers, int64_t size, int threads) {
  double sums[PARTS] = {0}, total = 0;
  const int64_t part = size / PARTS + 1 < 1 << 15 ? 1 << 15 : size / PARTS + 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < size; first += part) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < least(size, first + part); i++) sum += (double)numbers[i] * numbers[i];
    sums[first / part] = sum;
  }
  for (int i = 0; i < PARTS; i++) total += sums[i];
  return total;
}
