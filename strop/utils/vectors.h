/* Vectors of float, and cells: numbers of bfloat16 with BF16, else of float, that are computed with as float. */
#ifndef STROP_VECTORS
#define STROP_VECTORS
#include <stdint.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#ifndef LANES
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif
#if defined(__AVX512F__) && LANES == 16
#define IS_WIDE 1 /* vectors for which there are intrinsics */
#else
#define IS_WIDE 0
#endif
#if defined(BF16) && defined(__AVX512BF16__) && IS_WIDE
#define HAS_PAIRS 1 /* instructions that multiply and add pairs of bfloat16 */
#else
#define HAS_PAIRS 0
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

static inline vec all(float x) { return x - (vec){0}; }
static inline vec pick(ints where, vec x, vec other) { return (vec)((where & (ints)x) | (~where & (ints)other)); }

/* The larger of each two; the second where one is NaN. */
static inline vec larger(vec x, vec other) {
#if IS_WIDE
  return (vec)_mm512_max_ps((__m512)x, (__m512)other);
#else
  return pick(x > other, x, other);
#endif
}

/* e^x for x up to 88, and 0 far below -87: to 1e-7 of it. Source: the polynomial of expf in Cephes. */
static inline vec exponential(vec x) {
#if IS_WIDE
  const vec bounded = larger(all(-200), x);
  const vec n = (vec)_mm512_roundscale_ps((__m512)(bounded * 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
#else
  const vec bounded = pick(x < -87.0f, all(-87), pick(x > 88.0f, all(88), x)), scaled = bounded * 1.44269504f;
  const ints whole = __builtin_convertvector(scaled + pick(scaled < 0, all(-0.5f), all(0.5f)), ints);
  const vec n = __builtin_convertvector(whole, vec);
#endif
  const vec r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if IS_WIDE
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return pick(x < -87.0f, (vec){0}, p * (vec)((whole + 127) << 23));
#endif
}

#ifdef BF16
typedef uint16_t cell;
static inline float wide(cell x) {
  union { uint32_t bits; float value; } both = {.bits = (uint32_t)x << 16};
  return both.value;
}
static inline cell narrow(float x) { /* to nearest, ties to even; NaN stays NaN, with -ffast-math too */
  union { float value; uint32_t bits; } both = {.value = x};
  if ((both.bits & 0x7fffffff) > 0x7f800000) return (both.bits >> 16) | 0x40;
  return (both.bits + 0x7fff + ((both.bits >> 16) & 1)) >> 16;
}
#else
typedef float cell;
static inline float wide(cell x) { return x; }
static inline cell narrow(float x) { return x; }
#endif

static inline vec load_cells(const cell *from) {
#ifdef BF16
  return (vec)(__builtin_convertvector(*(const halves *)from, words) << 16);
#else
  return *(const vec *)from;
#endif
}

/* x, rounded to cells as by `narrow`. */
static inline vec rounded(vec x) {
#ifdef BF16
  const words bits = (words)x, nearest = bits + 0x7fff + ((bits >> 16) & 1);
  return (vec)((words)pick((bits & 0x7fffffff) > 0x7f800000, (vec)(bits | 0x400000), (vec)nearest) & 0xffff0000);
#else
  return x;
#endif
}

/* to [LANES] = x, as by `narrow`; with instructions for it numbers below 1e-38 become 0. */
static inline void store_cells(cell *to, vec x) {
#if HAS_PAIRS
  *(halves *)to = (halves)_mm512_cvtneps_pbh((__m512)x);
#elif defined(BF16)
  *(halves *)to = __builtin_convertvector((words)rounded(x) >> 16, halves);
#else
  *(vec *)to = x;
#endif
}
#endif
