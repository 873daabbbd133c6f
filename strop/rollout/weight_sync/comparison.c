/* Positions of the elements that differ between two arrays, in one pass at the speed of memory: most lines of the cache
   are equal and are passed over as a whole. */

#include <stdint.h>

enum { LINE = 64 };

static inline int is_equal(const uint8_t *a, const uint8_t *b)
{
    uint64_t differing = 0;
    const uint64_t *left = (const uint64_t *)a, *right = (const uint64_t *)b;
    for (int word = 0; word < LINE / 8; word++)
        differing |= left[word] ^ right[word];
    return differing == 0;
}

#define DIFFERING(TYPE, NAME)                                                                                            \
    static int64_t NAME(const TYPE *old, const TYPE *new, int64_t start, int64_t stop, int64_t *out, int64_t most)       \
    {                                                                                                                    \
        enum { PER_LINE = LINE / sizeof(TYPE) };                                                                         \
        int64_t count = 0;                                                                                               \
        for (int64_t at = start; at < stop; at += PER_LINE) {                                                            \
            int64_t end = stop - at < PER_LINE ? stop : at + PER_LINE;                                                   \
            if (end - at == PER_LINE && is_equal((const uint8_t *)(old + at), (const uint8_t *)(new + at)))              \
                continue;                                                                                                \
            if (count + PER_LINE > most)                                                                                 \
                return -1;                                                                                               \
            for (int64_t i = at; i < end; i++) {                                                                         \
                out[count] = i;                                                                                          \
                count += old[i] != new[i];                                                                               \
            }                                                                                                            \
        }                                                                                                                \
        return count;                                                                                                    \
    }

DIFFERING(uint8_t, differing_1)
DIFFERING(uint16_t, differing_2)
DIFFERING(uint32_t, differing_4)
DIFFERING(uint64_t, differing_8)

/* Of elements of `size` bytes [count], cut into parts of `part`: the positions that differ in part p, ascending, at
   out[p * most], and their number in counts[p]; -1 where there may be more than `most` less a line. */
void differing(const void *old, const void *new, int64_t count, int size, int64_t part, int64_t most, int64_t *out,
               int64_t *counts, int threads)
{
    int64_t parts = (count + part - 1) / part;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t p = 0; p < parts; p++) {
        int64_t start = p * part, stop = count - start < part ? count : start + part;
        int64_t *to = out + p * most;
        counts[p] = size == 1   ? differing_1(old, new, start, stop, to, most)
                    : size == 2 ? differing_2(old, new, start, stop, to, most)
                    : size == 4 ? differing_4(old, new, start, stop, to, most)
                                : differing_8(old, new, start, stop, to, most);
    }
}
