/* The next token of each row of logits, on a CPU.
 *
 * Compiled by kernel.py. A row's token is the inverse of its cumulative distribution at one number; what becomes of a row
 * does not depend on the others, and sums are made in an order of their own (see decode.c).
 */
#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>

#define BLOCK 128 /* numbers that are summed in float; their sums are added in double */

/* The first token up to which the sum of exps is above the threshold; never one whose exp is 0. sums: of each block. */
static int64_t found(const float *exps, const double *sums, int64_t n, double threshold) {
  double before = 0;
  for (int64_t first = 0; first < n; before += sums[first / BLOCK], first += BLOCK) {
    if (before + sums[first / BLOCK] <= threshold) continue;
    double sum = before;
    for (int64_t x = first; x < n && x < first + BLOCK; x++) {
      sum += exps[x];
      if (sum > threshold && exps[x] > 0) return x;
    } /* by rounding it may be the first of the next block */
  }
  int64_t last = n - 1;
  while (last > 0 && exps[last] == 0) last--;
  return last;
}

/* The token of a row [n], and its log-prob. Temperature 0 takes the likeliest, and gives its log-prob at 1. */
static void sample_row(const float *restrict row, int64_t n, double temperature, double uniform, double *restrict sums,
                       float *restrict exps, int64_t *token, float *log_prob) {
  const float factor = temperature == 0 ? 1 : 1 / temperature;
  float most = -FLT_MAX;
#pragma omp simd reduction(max : most)
  for (int64_t x = 0; x < n; x++) most = row[x] > most ? row[x] : most;
  double total = 0;
  for (int64_t first = 0; first < n; first += BLOCK) {
    const int64_t end = first + BLOCK < n ? first + BLOCK : n;
    float sum = 0;
    for (int64_t x = first; x < end; x++) exps[x] = expf((row[x] - most) * factor);
#pragma omp simd reduction(+ : sum)
    for (int64_t x = first; x < end; x++) sum += exps[x];
    sums[first / BLOCK] = sum;
    total += sum;
  }
  *token = 0;
  if (temperature != 0) *token = found(exps, sums, n, uniform * total);
  else
    while (*token < n - 1 && row[*token] < most) ++*token;
  *log_prob = (row[*token] - most) * factor - log(total);
}

/* tokens and log_probs [batch] of logits [batch, n]. uniform: [batch], in [0, 1). Returns 0, or 1 where there is no memory
 * for a row. */
int sample(const float *logits, const double *temperature, const double *uniform, int64_t *tokens, float *log_probs,
           int64_t batch, int64_t n, int num_threads) {
  const int64_t num_blocks = (n + BLOCK - 1) / BLOCK;
  int failed = 0;
#pragma omp parallel num_threads(num_threads) reduction(| : failed) if (batch * n > 1 << 14)
  {
    double *sums = malloc(num_blocks * (sizeof(double) + BLOCK * sizeof(float)));
    failed |= sums == NULL;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < batch; i++)
      if (sums != NULL)
        sample_row(logits + i * n, n, temperature[i], uniform[i], sums, (float *)(sums + num_blocks), tokens + i,
                   log_probs + i);
    free(sums);
  }
  return failed;
}
