/* Sums over 64-bit words as tensors.py defines them, at the speed of memory: the multipliers of one row of words stay
   in the cache, and a copy costs one pass over the source. Every function gives the sum modulo 2^64. */

#include <stdint.h>
#include <string.h>

enum { COLUMNS = 4096 };

static inline uint64_t mix(uint64_t word, uint64_t key)
{
    uint64_t product = key * (word ^ (word >> 32));
    return product ^ (product >> 32);
}

/* Words [count] of one row, the first of which meets columns[0]. */
static uint64_t row_sum(const uint64_t *restrict words, const uint64_t *restrict columns, int64_t count)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += mix(words[i], columns[i]);
    return sum;
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
        const uint8_t *words = source + 8 * (start - first);
        if (target) {
            memcpy(target + 8 * (start - first), words, 8 * (stop - start));
            words = target + 8 * (start - first);
        }
        total += rows[row] * row_sum((const uint64_t *)words, columns + (start - row * COLUMNS), stop - start);
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
