/* Products of float rows with matrices in the block formats of GGUF files, whose weights stay packed.

   Inputs are rounded to int8 with a scale for every 32 of them. Weights are decoded 256 at a time (a tile) to integer codes
   with scales and minimums of groups, so that weight = scale * code - minimum; codes and inputs are multiplied as integers:
   by VNNI or AVX2 on x86, by the dot-product extension on Arm, else by plain C. A tile serves all input rows, and the
   result of a row does not depend on the others. */

#include <string.h>

#include "kernels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#pragma GCC diagnostic ignored "-Wpsabi" /* all functions with vectors are inlined */

#define INLINE static inline __attribute__((always_inline))
enum { TILE = 256, BLOCK = 32, BLOCKS = TILE / BLOCK, OUTPUTS_PER_TASK = 16, MAX_INPUT_ROWS = 64 };
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));

#if defined(__ARM_FEATURE_DOTPROD)
enum { CENTRE = 0 }; /* codes are int8: int8 by int8 */
#else
enum { CENTRE = 128 }; /* codes are uint8: uint8 by int8, as x86 multiplies */
#endif

/* 256 weights. Formats with a scale for each 16 weights use both vectors of scales, the first one for the first half of
   each block of 32; the others only the first. */
typedef struct {
    u8x32 codes[BLOCKS];
    f32x8 scales[2], minimums[2];
} tile_t;

INLINE int has_halves(int format) { return format == Q2_K || format == Q3_K || format == Q6_K; }

INLINE int64_t bytes_of_tile(int64_t format) {
    switch (format) {
    case Q4_0: return 8 * 18;
    case Q4_1: return 8 * 20;
    case Q5_0: return 8 * 22;
    case Q5_1: return 8 * 24;
    case Q8_0: return 8 * 34;
    case Q2_K: return 84;
    case Q3_K: return 110;
    case Q4_K: return 144;
    case Q5_K: return 176;
    default: return 210;
    }
}

/* ---- decoding ---- */

INLINE u8x16 load16(const uint8_t *bytes) {
    u8x16 loaded;
    memcpy(&loaded, bytes, sizeof loaded);
    return loaded;
}

INLINE u8x32 load32(const uint8_t *bytes) {
    u8x32 loaded;
    memcpy(&loaded, bytes, sizeof loaded);
    return loaded;
}

INLINE u8x32 joined(u8x16 first, u8x16 second) {
#if defined(__AVX2__)
    return (u8x32)_mm256_set_m128i((__m128i)second, (__m128i)first);
#else
    u8x32 both;
    memcpy(&both, &first, sizeof first);
    memcpy((uint8_t *)&both + 16, &second, sizeof second);
    return both;
#endif
}

/* The low halves of 16 bytes, then the high halves. */
INLINE u8x32 nibbles(const uint8_t *bytes) {
    u8x16 packed = load16(bytes);
    return joined(packed & 15, packed >> 4);
}

/* 16 where the bit is set, else 0. */
INLINE u8x32 fifth_bits(const uint8_t *bytes) {
    uint32_t bits;
    memcpy(&bits, bytes, 4);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (u8x32)_mm256_maskz_set1_epi8(bits, 16);
#else
    const u32x8 shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    u32x8 fours = (((u32x8){} + bits) >> shifts) & 15;
    return (u8x32)((fours * 0x204081 & 0x01010101) << 4);
#endif
}

INLINE float half(const uint8_t *bytes) {
    uint16_t bits;
    memcpy(&bits, bytes, 2);
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#elif defined(__aarch64__)
    __fp16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
#else
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13, sign = (uint32_t)(bits & 0x8000) << 16;
    float value;
    memcpy(&value, &wide, 4);
    value *= 0x1p112f; /* from the exponent of half precision to that of single precision */
    return sign ? -value : value;
#endif
}

/* `count` halves that are `stride` bytes apart; the rest is 0. */
INLINE f32x8 halves(const uint8_t *bytes, int stride, int count) {
    f32x8 values = {};
#if defined(__F16C__)
    __m128i bits = _mm_setzero_si128();
    uint16_t one;
#define INSERT(INDEX)                                    \
    if (count > INDEX) {                                 \
        memcpy(&one, bytes + INDEX * stride, 2);         \
        bits = _mm_insert_epi16(bits, (short)one, INDEX); \
    }
    INSERT(0) INSERT(1) INSERT(2) INSERT(3) INSERT(4) INSERT(5) INSERT(6) INSERT(7)
#undef INSERT
    values = (f32x8)_mm256_cvtph_ps(bits);
#else
    for (int i = 0; i < count; i++) values[i] = half(bytes + i * stride);
#endif
    return values;
}

/* Eight small integers as floats. */
INLINE f32x8 floats(const uint8_t *integers) {
#if defined(__AVX2__)
    return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)integers)));
#else
    f32x8 values;
    for (int i = 0; i < 8; i++) values[i] = integers[i];
    return values;
#endif
}

/* Up to eight blocks of 32 weights. */
INLINE void decode_blocks(const uint8_t *data, int format, int blocks, tile_t *tile) {
    int stride = (int)bytes_of_tile(format) / BLOCKS;
    f32x8 scales = halves(data, stride, blocks);
    tile->scales[0] = scales;
    if (format == Q4_0) tile->minimums[0] = scales * 8;
    if (format == Q5_0) tile->minimums[0] = scales * 16;
    if (format == Q8_0) tile->minimums[0] = scales * CENTRE;
    if (format == Q4_1 || format == Q5_1) tile->minimums[0] = -halves(data + 2, stride, blocks);
#pragma GCC unroll 8
    for (int block = 0; block < blocks; block++, data += stride) {
        if (format == Q8_0) tile->codes[block] = load32(data + 2) ^ CENTRE;
        if (format == Q4_0) tile->codes[block] = nibbles(data + 2);
        if (format == Q4_1) tile->codes[block] = nibbles(data + 4);
        if (format == Q5_0) tile->codes[block] = nibbles(data + 6) | fifth_bits(data + 2);
        if (format == Q5_1) tile->codes[block] = nibbles(data + 8) | fifth_bits(data + 4);
    }
}

INLINE void decode_q2_k(const uint8_t *data, tile_t *tile) {
    float scale = half(data + 80), minimum = half(data + 82);
    uint8_t scales[2][8], minimums[2][8];
    for (int i = 0; i < 16; i++) {
        scales[i % 2][i / 2] = data[i] & 15;
        minimums[i % 2][i / 2] = data[i] >> 4;
    }
    for (int part = 0; part < 2; part++) {
        tile->scales[part] = floats(scales[part]) * scale;
        tile->minimums[part] = floats(minimums[part]) * minimum;
    }
#pragma GCC unroll 8
    for (int block = 0; block < BLOCKS; block++)
        tile->codes[block] = load32(data + 16 + 32 * (block / 4)) >> (2 * (block % 4)) & 3;
}

INLINE void decode_q3_k(const uint8_t *data, tile_t *tile) {
    const uint8_t *packed = data + 96;
    float scale = half(data + 108);
    uint8_t scales[2][8];
    for (int i = 0; i < 16; i++) {
        int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4, high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
        scales[i % 2][i / 2] = (uint8_t)(low | high << 4);
    }
    for (int part = 0; part < 2; part++) {
        tile->scales[part] = (floats(scales[part]) - 32) * scale;
        tile->minimums[part] = tile->scales[part] * 4;
    }
    u8x32 third = load32(data);
#pragma GCC unroll 8
    for (int block = 0; block < BLOCKS; block++) {
        u8x32 low = load32(data + 32 + 32 * (block / 4)) >> (2 * (block % 4)) & 3;
        tile->codes[block] = low | (third >> block & 1) << 2;
    }
}

/* Scales and minimums of Q4_K and Q5_K: eight of 6 bits each, in 12 bytes. */
INLINE void decode_k_scales(const uint8_t *data, tile_t *tile) {
    uint32_t first, second, third;
    memcpy(&first, data + 4, 4);
    memcpy(&second, data + 8, 4);
    memcpy(&third, data + 12, 4);
    uint32_t scales[2] = {first & 0x3f3f3f3f, (third & 0x0f0f0f0f) | (first >> 2 & 0x30303030)};
    uint32_t minimums[2] = {second & 0x3f3f3f3f, (third >> 4 & 0x0f0f0f0f) | (second >> 2 & 0x30303030)};
    uint64_t both = scales[0] | (uint64_t)scales[1] << 32;
    tile->scales[0] = floats((const uint8_t *)&both) * half(data);
    both = minimums[0] | (uint64_t)minimums[1] << 32;
    tile->minimums[0] = floats((const uint8_t *)&both) * half(data + 2);
}

INLINE void decode_q4_k(const uint8_t *data, tile_t *tile) {
    decode_k_scales(data, tile);
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++) {
        u8x32 packed = load32(data + 16 + 32 * part);
        tile->codes[2 * part] = packed & 15;
        tile->codes[2 * part + 1] = packed >> 4;
    }
}

INLINE void decode_q5_k(const uint8_t *data, tile_t *tile) {
    u8x32 fifth = load32(data + 16);
    decode_k_scales(data, tile);
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++) {
        u8x32 packed = load32(data + 48 + 32 * part);
        tile->codes[2 * part] = (packed & 15) | (fifth >> (2 * part) & 1) << 4;
        tile->codes[2 * part + 1] = packed >> 4 | (fifth >> (2 * part + 1) & 1) << 4;
    }
}

INLINE void decode_q6_k(const uint8_t *data, tile_t *tile) {
    float scale = half(data + 208);
    uint8_t scales[2][8]; /* of int8, moved by 128 */
    for (int i = 0; i < 16; i++) scales[i % 2][i / 2] = data[192 + i] ^ 128;
    for (int part = 0; part < 2; part++) {
        tile->scales[part] = (floats(scales[part]) - 128) * scale;
        tile->minimums[part] = tile->scales[part] * 32;
    }
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
        u8x32 first = load32(data + 64 * part), second = load32(data + 64 * part + 32), high = load32(data + 128 + 32 * part);
        tile->codes[4 * part] = (first & 15) | (high & 3) << 4;
        tile->codes[4 * part + 1] = (second & 15) | (high >> 2 & 3) << 4;
        tile->codes[4 * part + 2] = first >> 4 | (high >> 4 & 3) << 4;
        tile->codes[4 * part + 3] = second >> 4 | high >> 6 << 4;
    }
}

INLINE void decode(const uint8_t *data, int format, int blocks, tile_t *tile) {
    switch (format) {
    case Q2_K: decode_q2_k(data, tile); break;
    case Q3_K: decode_q3_k(data, tile); break;
    case Q4_K: decode_q4_k(data, tile); break;
    case Q5_K: decode_q5_k(data, tile); break;
    case Q6_K: decode_q6_k(data, tile); break;
    default: decode_blocks(data, format, blocks, tile);
    }
}

/* ---- inputs ---- */

typedef struct {
    int64_t padded;      /* inputs, rounded up to whole tiles */
    int8_t *codes;       /* [row, padded] */
    float *scales;       /* [row, padded / 32] */
    float *sums[3];      /* [row, padded / 32]: scale times the sum of the codes of a block, its first and its second half */
} inputs_t;

static void round_inputs(const float *x, int64_t inputs, int64_t row, inputs_t *out) {
    int8_t *codes = out->codes + row * out->padded;
    int64_t base = row * (out->padded / BLOCK);
    for (int64_t block = 0; block < out->padded / BLOCK; block++, x += BLOCK, codes += BLOCK) {
        if (block * BLOCK >= inputs) {
            memset(codes, 0, BLOCK);
            out->scales[base + block] = out->sums[0][base + block] = out->sums[1][base + block] = out->sums[2][base + block] = 0;
            continue;
        }
        float largest = 0;
        for (int i = 0; i < BLOCK; i++) {
            float size = __builtin_fabsf(x[i]);
            largest = size > largest ? size : largest;
        }
        float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
        int32_t rounded[BLOCK], sums[2] = {0, 0};
        for (int i = 0; i < BLOCK; i++) rounded[i] = (int32_t)__builtin_rintf(x[i] * inverse);
        for (int i = 0; i < BLOCK; i++) codes[i] = (int8_t)rounded[i];
        for (int i = 0; i < BLOCK / 2; i++) sums[0] += rounded[i];
        for (int i = 0; i < BLOCK / 2; i++) sums[1] += rounded[i + BLOCK / 2];
        out->scales[base + block] = scale;
        out->sums[0][base + block] = scale * (float)(sums[0] + sums[1]);
        out->sums[1][base + block] = scale * (float)sums[0];
        out->sums[2][base + block] = scale * (float)sums[1];
    }
}

/* ---- products: sums that are carried from tile to tile, then reduced to one number ---- */

#if defined(__AVX2__)
typedef __m256 sum_t;
INLINE sum_t no_sum(void) { return _mm256_setzero_ps(); }

INLINE __m256 dots(u8x32 codes, const int8_t *x) { /* eight sums of four products */
    __m256i rounded = _mm256_loadu_si256((const __m256i *)x);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(_mm256_setzero_si256(), (__m256i)codes, rounded));
#elif defined(__AVXVNNI__)
    return _mm256_cvtepi32_ps(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), (__m256i)codes, rounded));
#else /* by 16-bit products: the sum of two products of bytes may exceed 16 bits */
    __m256i low = _mm256_madd_epi16(_mm256_and_si256((__m256i)codes, _mm256_set1_epi16(255)),
                                    _mm256_srai_epi16(_mm256_slli_epi16(rounded, 8), 8));
    __m256i high = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)codes, 8), _mm256_srai_epi16(rounded, 8));
    return _mm256_cvtepi32_ps(_mm256_add_epi32(low, high));
#endif
}

INLINE sum_t add_block(sum_t sum, u8x32 codes, const int8_t *x, float scale) {
    return _mm256_fmadd_ps(dots(codes, x), _mm256_set1_ps(scale), sum);
}

INLINE sum_t add_half_blocks(sum_t sum, u8x32 codes, const int8_t *x, float first, float second) {
    return _mm256_fmadd_ps(dots(codes, x), _mm256_set_m128(_mm_set1_ps(second), _mm_set1_ps(first)), sum);
}
#elif defined(__ARM_FEATURE_DOTPROD)
typedef float32x4_t sum_t;
INLINE sum_t no_sum(void) { return vdupq_n_f32(0); }

INLINE sum_t add_block(sum_t sum, u8x32 codes, const int8_t *x, float scale) {
    const int8_t *bytes = (const int8_t *)&codes;
    int32x4_t dots = vdotq_s32(vdupq_n_s32(0), vld1q_s8(bytes), vld1q_s8(x));
    dots = vdotq_s32(dots, vld1q_s8(bytes + 16), vld1q_s8(x + 16));
    return vfmaq_n_f32(sum, vcvtq_f32_s32(dots), scale);
}

INLINE sum_t add_half_blocks(sum_t sum, u8x32 codes, const int8_t *x, float first, float second) {
    const int8_t *bytes = (const int8_t *)&codes;
    int32x4_t dots = vdotq_s32(vdupq_n_s32(0), vld1q_s8(bytes), vld1q_s8(x));
    sum = vfmaq_n_f32(sum, vcvtq_f32_s32(dots), first);
    dots = vdotq_s32(vdupq_n_s32(0), vld1q_s8(bytes + 16), vld1q_s8(x + 16));
    return vfmaq_n_f32(sum, vcvtq_f32_s32(dots), second);
}
#else
typedef float sum_t __attribute__((vector_size(4)));
INLINE sum_t no_sum(void) { return (sum_t){0}; }

INLINE sum_t add_half_blocks(sum_t sum, u8x32 codes, const int8_t *x, float first, float second) {
    int dots[2] = {0, 0};
    for (int i = 0; i < BLOCK; i++) dots[i / 16] += codes[i] * x[i];
    return sum + first * (float)dots[0] + second * (float)dots[1];
}

INLINE sum_t add_block(sum_t sum, u8x32 codes, const int8_t *x, float scale) {
    return add_half_blocks(sum, codes, x, scale, scale);
}
#endif

typedef struct {
    sum_t products[2]; /* of codes and inputs, scaled; two, so that one addition need not wait for the last */
    f32x8 reductions;  /* by the minimums */
} totals_t;

INLINE f32x8 load_floats(const float *values) {
    f32x8 loaded;
    memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

INLINE void add_tile(totals_t *totals, const tile_t *tile, int format, int blocks, const inputs_t *x, int64_t row, int64_t start) {
    const int8_t *codes = x->codes + row * x->padded + start;
    int64_t at = (row * x->padded + start) / BLOCK;
    sum_t *products = totals->products;
    f32x8 input_scales = load_floats(x->scales + at), first = tile->scales[0] * input_scales;
    if (has_halves(format)) {
        f32x8 second = tile->scales[1] * input_scales;
        totals->reductions += tile->minimums[0] * load_floats(x->sums[1] + at);
        totals->reductions += tile->minimums[1] * load_floats(x->sums[2] + at);
#pragma GCC unroll 8
        for (int block = 0; block < blocks; block++)
            products[block % 2] = add_half_blocks(products[block % 2], tile->codes[block], codes + BLOCK * block, first[block], second[block]);
    } else {
        totals->reductions += tile->minimums[0] * load_floats(x->sums[0] + at);
#pragma GCC unroll 8
        for (int block = 0; block < blocks; block++)
            products[block % 2] = add_block(products[block % 2], tile->codes[block], codes + BLOCK * block, first[block]);
    }
}

INLINE float reduced(const totals_t *totals) {
    float sum = 0;
    for (unsigned i = 0; i < sizeof(sum_t) / sizeof(float); i++) sum += totals->products[0][i] + totals->products[1][i];
    for (int i = 0; i < 8; i++) sum -= totals->reductions[i];
    return sum;
}

/* ---- one output for all input rows ---- */

INLINE void one_tile(const uint8_t *data, int format, int blocks, const inputs_t *x, int64_t rows, int64_t start, totals_t *totals) {
    tile_t tile;
    decode(data, format, blocks, &tile);
    if (rows == 1)
        add_tile(totals, &tile, format, blocks, x, 0, start);
    else
        for (int64_t row = 0; row < rows; row++) add_tile(totals + row, &tile, format, blocks, x, row, start);
}

INLINE void one_output(const uint8_t *data, int format, const inputs_t *x, int64_t inputs, int64_t rows, totals_t *totals) {
    int64_t start = 0, step = bytes_of_tile(format);
    memset(totals, 0, sizeof(totals_t) * rows);
    for (; start + TILE <= inputs; start += TILE, data += step) one_tile(data, format, BLOCKS, x, rows, start, totals);
    if (start + TILE / 2 == inputs)
        one_tile(data, format, BLOCKS / 2, x, rows, start, totals);
    else if (start < inputs)
        one_tile(data, format, (int)(inputs - start) / BLOCK, x, rows, start, totals);
}

INLINE void outputs_of(const matrix_t *matrix, int format, int64_t first, int64_t last, const inputs_t *x, int64_t inputs,
                       int64_t rows, float *out, int64_t stride) {
    int64_t row_bytes = inputs / BLOCK * bytes_of_tile(format) / BLOCKS;
    for (int64_t output = first; output < last; output++) {
        const uint8_t *data = matrix->data + output * row_bytes;
        float bias = matrix->bias ? matrix->bias[output] : 0;
        if (rows == 1) {
            totals_t total;
            one_output(data, format, x, inputs, 1, &total);
            out[output] = reduced(&total) + bias;
        } else {
            totals_t totals[MAX_INPUT_ROWS];
            one_output(data, format, x, inputs, rows, totals);
            for (int64_t row = 0; row < rows; row++) out[row * stride + output] = reduced(totals + row) + bias;
        }
    }
}

static void some_outputs(const matrix_t *matrix, int64_t first, int64_t last, const inputs_t *x, int64_t inputs, int64_t rows,
                         float *out, int64_t stride) {
    switch (matrix->format) {
#define CASE(FORMAT) case FORMAT: outputs_of(matrix, FORMAT, first, last, x, inputs, rows, out, stride); break;
        CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q2_K) CASE(Q3_K) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)
#undef CASE
    }
}

/* ---- threads ---- */

extern void GOMP_parallel(void (*task)(void *), void *argument, unsigned threads, unsigned flags) __attribute__((weak));

void run_on_threads(void (*task)(void *), void *argument, int64_t threads) {
    if (GOMP_parallel && threads > 1)
        GOMP_parallel(task, argument, (unsigned)threads, 0);
    else
        task(argument);
}

typedef struct {
    const matrix_t *matrices;
    int64_t count, inputs, rows, outputs, next;
    inputs_t x;
    float *out;
} job_t;

static void work(void *argument) {
    job_t *job = argument;
    for (;;) {
        int64_t first = __atomic_fetch_add(&job->next, OUTPUTS_PER_TASK, __ATOMIC_RELAXED), offset = 0;
        if (first >= job->outputs) return;
        int64_t last = first + OUTPUTS_PER_TASK < job->outputs ? first + OUTPUTS_PER_TASK : job->outputs;
        for (int64_t index = 0; index < job->count; index++) {
            const matrix_t *matrix = job->matrices + index;
            int64_t begin = first > offset ? first - offset : 0;
            int64_t end = last - offset < matrix->outputs ? last - offset : matrix->outputs;
            if (begin < end)
                some_outputs(matrix, begin, end, &job->x, job->inputs, job->rows, job->out + offset, job->outputs);
            offset += matrix->outputs;
        }
    }
}

int64_t block_linear_scratch(int64_t inputs, int64_t rows) {
    int64_t padded = (inputs + TILE - 1) / TILE * TILE;
    rows = rows < MAX_INPUT_ROWS ? rows : MAX_INPUT_ROWS;
    return rows * (padded + 4 * padded / BLOCK * (int64_t)sizeof(float));
}

void block_linear(const matrix_t *matrices, int64_t count, const float *x, int64_t inputs, int64_t rows, float *out,
                  uint8_t *scratch, int64_t threads) {
    int64_t outputs = 0, padded = (inputs + TILE - 1) / TILE * TILE;
    for (int64_t index = 0; index < count; index++) outputs += matrices[index].outputs;
    for (int64_t done = 0; done < rows; done += MAX_INPUT_ROWS) {
        int64_t some = rows - done < MAX_INPUT_ROWS ? rows - done : MAX_INPUT_ROWS, blocks = some * padded / BLOCK;
        float *scales = (float *)(scratch + some * padded);
        inputs_t rounded = {padded, (int8_t *)scratch, scales, {scales + blocks, scales + 2 * blocks, scales + 3 * blocks}};
        job_t job = {matrices, count, inputs, some, outputs, 0, rounded, out + done * outputs};
        for (int64_t row = 0; row < some; row++) round_inputs(x + (done + row) * inputs, inputs, row, &job.x);
        run_on_threads(work, &job, threads);
    }
}
