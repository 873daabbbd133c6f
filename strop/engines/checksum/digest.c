/* Sums over 64-bit words as tensors.py defines them, at the speed of memory: the multipliers of one row of words stay
   in the cache, and a copy costs one pass over the source. Every function gives the sum modulo 2^64. */

#include <stdint.h>
#include <string.h>

enum { COLUMNS = 4096, BLOCK = 512 };

static inline uint64_t mix(uint64_t word, uint64_t key)
{
    uint64_t product = key * (word ^ (word >> 32));
    return product ^ (product >> 32);
}

/* Words [count] that meet columns[0] and the following ones. */
static uint64_t sum(const uint64_t *restrict words, const uint64_t *restrict columns, int64_t count)
{
    uint64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        total += mix(words[i], columns[i]);
    return total;
}

/* The same of what a target holds once the words were copied there, a block at a time. While a block is summed up, the
   next one of both sides is fetched: the processor would wait for memory in the copy, and compute in the sum. */
static uint64_t copy_and_sum(uint8_t *target, const uint8_t *source, const uint64_t *columns, int64_t count)
{
    uint64_t total = 0;
    for (int64_t at = 0; at < count; at += BLOCK) {
        int64_t words = count - at < BLOCK ? count - at : BLOCK;
        uint8_t *to = target + 8 * at;
        const uint8_t *from = source + 8 * at;
        memcpy(to, from, 8 * words);
        for (int64_t part = 0; part < words; part += 32) {
            for (int64_t line = 0; line < 256; line += 64) {
                __builtin_prefetch(from + 8 * (BLOCK + part) + line, 0, 3);
                __builtin_prefetch(to + 8 * (BLOCK + part) + line, 1, 3);
            }
            total += sum((const uint64_t *)to + part, columns + at + part, words - part < 32 ? words - part : 32);
        }
    }
    return total;
}

/* The sum of bytes [num_bytes] whose first one is that of word `first` of a tensor; a last word that is not whole is
   filled up with zeros. With a target, the bytes are copied there row by row, and what is summed up is what the target
   then holds. */
uint64_t word_sum(uint8_t *target, const uint8_t *source, int64_t num_bytes, int64_t first, const uint64_t *rows,
                  const uint64_t *columns, int threads)
{
    int64_t count = num_bytes / 8, rest = num_bytes % 8;
    int64_t first_row = first / COLUMNS, last_row = count ? (first + count - 1) / COLUMNS : first_row - 1;
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static) if (threads > 1 && last_row - first_row > 16)
    for (int64_t row = first_row; row <= last_row; row++) {
        int64_t start = row * COLUMNS > first ? row * COLUMNS : first;
        int64_t stop = (row + 1) * COLUMNS < first + count ? (row + 1) * COLUMNS : first + count;
        const uint8_t *from = source + 8 * (start - first);
        const uint64_t *keys = columns + (start - row * COLUMNS);
        total += rows[row] * (target ? copy_and_sum(target + 8 * (start - first), from, keys, stop - start)
                                     : sum((const uint64_t *)from, keys, stop - start));
    }
    if (rest) {
        uint64_t last = 0, at = first + count;
        if (target)
            memcpy(target + 8 * count, source + 8 * count, rest);
        memcpy(&last, (target ? target : source) + 8 * count, rest);
        total += rows[at / COLUMNS] * mix(last, columns[at % COLUMNS]);
    }
    return total;
}

/* The sum of runs [count] of words [length], which lie one behind the other here and `stride` words apart in their tensor. */
uint64_t word_sum_of_runs(const uint64_t *source, int64_t count, int64_t length, int64_t first, int64_t stride,
                          const uint64_t *rows, const uint64_t *columns)
{
    uint64_t total = 0;
    for (int64_t run = 0; run < count; run++)
        total += word_sum(NULL, (const uint8_t *)(source + run * length), 8 * length, first + run * stride, rows, columns, 1);
    return total;
}
