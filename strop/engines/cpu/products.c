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

#define WIDTH 64           /* columns of a panel of a weight, of which those of a tile are copied into one piece */
#define DEPTH 512          /* and its rows: 128 KiB, which stay in the cache */
#define BLOCK (10 * ROWS)  /* rows that go through all of a panel together: their inputs stay in the cache too */
#define TOGETHER 256       /* tokens whose products are added in registers for a gradient by a weight */
#define STRIP (32 * ROWS)  /* rows of such a gradient that a thread takes at a time, at most */
#define FEWEST (8 * ROWS)  /* rows beside a panel that a thread takes at a time, where there are as many */
#define AHEAD 16           /* rows that are fetched before they are copied: they lie too far apart for the processor to guess */
#define CHUNK 504          /* tokens whose inner states are held, at most: a multiple of ROWS */
#define BY_COLUMNS 1
#define BY_ROWS 0

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t whole_tiles(int64_t rows) { return (rows + ROWS - 1) / ROWS * ROWS; }

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

/* to = from [depth, width], where the columns of each tile lie in one piece of `room` rows. */
static inline void by_tiles(int64_t depth, int64_t width, const float *restrict from, int64_t from_row, float *restrict to,
                            int64_t room) {
  for (int64_t i = 0; i < depth; i++)
    for (int64_t j = 0; j < width; j += LANES) {
      __builtin_prefetch(from + (i + AHEAD) * from_row + j);
      store(to + (j / ACROSS * room + i) * ACROSS + j % ACROSS, load(from + i * from_row + j));
    }
}

/* The same of from [width, depth] transposed. */
static inline void turned_by_tiles(int64_t depth, int64_t width, const float *restrict from, int64_t from_row,
                                   float *restrict to, int64_t room) {
  for (int64_t j = 0; j < width; j += LANES)
    for (int64_t i = 0; i < depth; i += LANES)
      transpose(from + j * from_row + i, from_row, to + (j / ACROSS * room + i) * ACROSS + j % ACROSS, ACROSS);
}

/* out [rows, width] (+)= x [rows, depth] times a panel [depth, width] of a weight, which has it by rows or by columns. */
static void panel(int64_t rows, int64_t width, int64_t depth, const float *x, int64_t x_row, const float *weight,
                  int64_t weight_row, int order, float *out, int64_t out_row, int adds) {
  if (rows <= ROWS) return few(rows, width, depth, x, x_row, weight, weight_row, order, out, out_row, adds);
  float copy[DEPTH * WIDTH];
  for (int64_t from = 0; from < depth; from += DEPTH) {
    const int64_t some = least(DEPTH, depth - from);
    if (order == BY_COLUMNS)
      turned_by_tiles(some, width, weight + from, weight_row, copy, DEPTH);
    else
      by_tiles(some, width, weight + from * weight_row, weight_row, copy, DEPTH);
    for (int64_t i = 0; i < rows; i += BLOCK)
      for (int64_t j = 0; j < width; j += ACROSS)
        product(least(BLOCK, rows - i), least(ACROSS, width - j), some, x + i * x_row + from, x_row, 1, copy + j * DEPTH, ACROSS,
                out + i * out_row + j, out_row, adds || from);
  }
}

/* What a thread takes at a time of a product. */
struct piece {
  int64_t rows, columns;
};

/* As large as keeps all threads busy: where panels are few, those of one tile's columns. */
static struct piece piece_of(int64_t rows, int64_t width, int threads) {
  const int64_t most = (rows + FEWEST - 1) / FEWEST * ((width + WIDTH - 1) / WIDTH), columns = most < threads ? ACROSS : WIDTH;
  const int64_t panels = (width + columns - 1) / columns, parts = (3 * threads + panels - 1) / panels;
  const int64_t some = (rows + parts - 1) / parts;
  return (struct piece){some < FEWEST ? FEWEST : whole_tiles(some), columns};
}

/* out [m, n] = inputs [m, k] times weight [n, k] transposed, plus bias [n], which may be NULL. */
void linear(const float *inputs, const float *weight, const float *bias, float *out, int64_t m, int64_t n, int64_t k,
            int threads) {
  const struct piece part = piece_of(m, n, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) collapse(2)
  for (int64_t i = 0; i < m; i += part.rows)
    for (int64_t j = 0; j < n; j += part.columns) {
      const int64_t rows = least(part.rows, m - i), width = least(part.columns, n - j);
      if (bias)
        for (int64_t r = i; r < i + rows; r++) memcpy(out + r * n + j, bias + j, sizeof(float) * width);
      panel(rows, width, k, inputs + i * k, k, weight + j * k, k, BY_COLUMNS, out + i * n + j, n, bias != NULL);
    }
}

/* out [m, k] = grad [m, n] times weight [n, k]. */
void linear_back(const float *grad, const float *weight, float *out, int64_t m, int64_t n, int64_t k, int threads) {
  const struct piece part = piece_of(m, k, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) collapse(2)
  for (int64_t i = 0; i < m; i += part.rows)
    for (int64_t j = 0; j < k; j += part.columns)
      panel(least(part.rows, m - i), least(part.columns, k - j), n, grad + i * n, n, weight + j, k, BY_ROWS, out + i * k + j, k, 0);
}

/* Rows of a part, at least one, where `rows` are cut into equal parts of at most `most`, as many for each thread. */
static int64_t even_part(int64_t rows, int64_t most, int threads) {
  const int64_t share = (rows + threads - 1) / threads, parts = (share + most - 1) / most;
  return parts ? (share + parts - 1) / parts : 1;
}

/* Rows of a gradient by a weight that a thread takes at a time: many, as the inputs are copied for each of these. */
static int64_t strip_of(int64_t rows, int threads) { return whole_tiles(even_part(rows, STRIP, threads)); }

/* Some rows [from, from + count) of out [n, k] (+)= grad [m, n] transposed times inputs [m, k]: what is read by columns is
 * copied, that of each tile into one piece. */
static void add_gradient(int64_t from, int64_t count, int64_t k, int64_t m, const float *grad, int64_t grad_row,
                         const float *inputs, int64_t inputs_row, float *out, int adds) {
  float rows[STRIP * TOGETHER], columns[TOGETHER * WIDTH];
  const int64_t together = even_part(m, TOGETHER, 1), last = count / ROWS * ROWS;
  for (int64_t t = 0; t < m; t += together) {
    const int64_t some = least(together, m - t);
    for (int64_t i = 0; i < some; i++) {
      const float *row = grad + (t + i) * grad_row + from;
      for (int64_t r = 0; r < count; r += 64 / sizeof(float)) __builtin_prefetch(row + AHEAD * grad_row + r);
      for (int64_t r = 0; r < last; r += ROWS) memcpy(rows + r * TOGETHER + i * ROWS, row + r, sizeof(float) * ROWS);
      for (int64_t r = last; r < count; r++) rows[last * TOGETHER + i * ROWS + r - last] = row[r];
    }
    for (int64_t j = 0; j < k; j += WIDTH) {
      const int64_t width = least(WIDTH, k - j);
      by_tiles(some, width, inputs + t * inputs_row + j, inputs_row, columns, TOGETHER);
      for (int64_t x = 0; x < width; x += ACROSS)
        for (int64_t r = 0; r < count; r += ROWS)
          product(least(ROWS, count - r), least(ACROSS, width - x), some, rows + r * TOGETHER, 1, ROWS, columns + x * TOGETHER,
                  ACROSS, out + (from + r) * k + j + x, k, adds || t);
    }
  }
}

/* out [n, k] (+)= grad [m, n] transposed times inputs [m, k]; n is of any size. */
void weight_gradient(const float *grad, const float *inputs, float *out, int64_t m, int64_t n, int64_t k, int adds, int threads) {
  const int64_t strip = strip_of(n, threads);
  if (!m && !adds) memset(out, 0, sizeof(float) * n * k);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t from = 0; from < n; from += strip)
    add_gradient(from, least(strip, n - from), k, m, grad, n, inputs, k, out, adds);
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
static int64_t chunk_of(int64_t tokens) { return whole_tiles(even_part(tokens, CHUNK, 1)); }

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
    const int64_t tokens = least(chunk, p->tokens - first), kept = p->gates ? inner : row;
    const struct piece part = piece_of(tokens, inner, threads), outer = piece_of(tokens, dim, threads);
    float *gates = p->gates ? p->gates + first * inner : states, *ups = p->ups ? p->ups + first * inner : states + chunk * row;
    const float *hidden = p->hidden + first * dim;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < tokens; i += part.rows)
      for (int64_t j = 0; j < inner; j += part.columns) {
        const int64_t rows = least(part.rows, tokens - i), width = least(part.columns, inner - j);
        panel(rows, width, dim, hidden + i * dim, dim, p->gate + j * dim, dim, BY_COLUMNS, gates + i * kept + j, kept, 0);
        panel(rows, width, dim, hidden + i * dim, dim, p->up + j * dim, dim, BY_COLUMNS, ups + i * kept + j, kept, 0);
        for (int64_t r = i; r < i + rows; r++)
          for (int64_t x = j; x < j + width; x += LANES) {
            const vec gate = load(gates + r * kept + x);
            store(acts + r * row + x, gate * sigmoid(gate) * load(ups + r * kept + x));
          }
      }
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < tokens; i += outer.rows)
      for (int64_t j = 0; j < dim; j += outer.columns)
        panel(least(outer.rows, tokens - i), least(outer.columns, dim - j), inner, acts + i * row, row, p->down + j * inner,
              inner, BY_COLUMNS, p->out + (first + i) * dim + j, dim, 0);
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
    const int64_t tokens = least(chunk, p->tokens - first);
    const struct piece part = piece_of(tokens, inner, threads), outer = piece_of(tokens, dim, threads);
    const int64_t inner_strip = strip_of(inner, threads), outer_strip = strip_of(dim, threads);
    const float *grad = p->grad + first * dim, *hidden = p->hidden + first * dim;
    const float *gates = p->gates + first * inner, *ups = p->ups + first * inner;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < tokens; i += part.rows)
      for (int64_t j = 0; j < inner; j += part.columns) {
        const int64_t rows = least(part.rows, tokens - i), width = least(part.columns, inner - j);
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
      for (int64_t i = 0; i < tokens; i += outer.rows)
        for (int64_t j = 0; j < dim; j += outer.columns) {
          const int64_t rows = least(outer.rows, tokens - i), width = least(outer.columns, dim - j);
          float *out = p->grad_hidden + (first + i) * dim + j;
          panel(rows, width, inner, of_gates + i * row, row, p->gate + j, dim, BY_ROWS, out, dim, 0);
          panel(rows, width, inner, of_ups + i * row, row, p->up + j, dim, BY_ROWS, out, dim, 1);
        }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t from = 0; from < inner; from += inner_strip) {
      const int64_t count = least(inner_strip, inner - from);
      if (p->grad_gate) add_gradient(from, count, dim, tokens, of_gates, row, hidden, dim, p->grad_gate, first > 0);
      if (p->grad_up) add_gradient(from, count, dim, tokens, of_ups, row, hidden, dim, p->grad_up, first > 0);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t from = 0; from < (p->grad_down ? dim : 0); from += outer_strip)
      add_gradient(from, least(outer_strip, dim - from), inner, tokens, grad, dim, acts, row, p->grad_down, first > 0);
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
