/* Vectors of floats, as wide as the CPU's registers. */

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi" /* all functions with vectors are inlined */

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float vector_t __attribute__((vector_size(4 * LANES)));
typedef int32_t integers_t __attribute__((vector_size(4 * LANES)));

INLINE vector_t load(const float *values) {
    vector_t loaded;
    memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

INLINE void store(float *values, vector_t vector) { memcpy(values, &vector, sizeof vector); }

/* The nearest integers, of values up to 2^22: a float of 1.5 · 2^23 has no fraction. */
INLINE vector_t rounded(vector_t values) { return values + 12582912.0f - 12582912.0f; }
