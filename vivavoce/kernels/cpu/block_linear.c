/* Products of float rows with matrices in the block formats of GGUF files, whose weights stay packed.

   Inputs are rounded to int8 with a scale for every 32 of them. Weights are decoded 256 at a time (a tile) to integer codes
   with scales and minimums of groups, so that weight = scale * code - minimum; codes and inputs are multiplied as integers:
   by AVX-512 (two blocks of 32 in one vector) or AVX2 on x86, with VNNI where there is one, by the dot-product extension on
   Arm, else by plain C. A tile serves all input rows, and the result of a row does not depend on the others. */

#include "block_tiles.h"
#include "kernels.h"

enum { MIN_TASK = 16, MAX_TASK = 128, TASKS_PER_THREAD = 4, MAX_INPUT_ROWS = 64, CACHE_LINE = 64, AHEAD = 2048 /* bytes that are fetched in advance */ };

/* ---- inputs ---- */

typedef struct {
    int64_t padded;      /* inputs, rounded up to whole tiles */
    int8_t *codes;       /* [row, padded] */
    float *scales;       /* [row, padded / 32] */
    float *sums[3];      /* [row, padded / 32]: scale times the sum of the codes of a block, its first and its second half */
} inputs_t;

/* 32 inputs as int8 with one scale; the sums of the codes of both halves. */
INLINE void round_block(const float *x, int8_t *codes, float *scale, int32_t sums[2]) {
#if defined(WIDE)
    __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + BLOCK / 2);
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
    __m512 inverse = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
    __m512i rounded[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(first, inverse)), _mm512_cvtps_epi32(_mm512_mul_ps(second, inverse))};
    for (int half = 0; half < 2; half++) {
        _mm_storeu_si128((__m128i *)(codes + BLOCK / 2 * half), _mm512_cvtepi32_epi8(rounded[half]));
        sums[half] = _mm512_reduce_add_epi32(rounded[half]);
    }
#else
    float largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        float size = __builtin_fabsf(x[i]);
        largest = size > largest ? size : largest;
    }
    float inverse = largest > 0 ? 127 / largest : 0;
    int32_t rounded[BLOCK];
    for (int i = 0; i < BLOCK; i++) rounded[i] = (int32_t)__builtin_rintf(x[i] * inverse);
    for (int i = 0; i < BLOCK; i++) codes[i] = (int8_t)rounded[i];
    sums[0] = sums[1] = 0;
    for (int i = 0; i < BLOCK / 2; i++) sums[0] += rounded[i];
    for (int i = 0; i < BLOCK / 2; i++) sums[1] += rounded[i + BLOCK / 2];
#endif
    *scale = largest / 127;
}

static void round_inputs(const float *x, int64_t inputs, int64_t row, inputs_t *out) {
    int8_t *codes = out->codes + row * out->padded;
    int64_t base = row * (out->padded / BLOCK);
    for (int64_t block = 0; block < out->padded / BLOCK; block++, x += BLOCK, codes += BLOCK) {
        if (block * BLOCK >= inputs) {
            memset(codes, 0, BLOCK);
            out->scales[base + block] = out->sums[0][base + block] = out->sums[1][base + block] = out->sums[2][base + block] = 0;
            continue;
        }
        float scale;
        int32_t sums[2];
        round_block(x, codes, &scale, sums);
        out->scales[base + block] = scale;
        out->sums[0][base + block] = scale * (float)(sums[0] + sums[1]);
        out->sums[1][base + block] = scale * (float)sums[0];
        out->sums[2][base + block] = scale * (float)sums[1];
    }
}

/* ---- products: sums that are carried from tile to tile, then reduced to one number ---- */

#if defined(WIDE)
typedef __m512 sum_t;

INLINE __m512 dots(__m512i codes, const int8_t *x, int format) { /* sixteen sums of four products */
    __m512i rounded = _mm512_loadu_si512(x);
#if defined(VNNI)
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, rounded));
#else /* two products of bytes stay within 16 bits: the codes have at most 7 bits, or 8 with a sign */
    if (format == Q8_0) {
        rounded = _mm512_mask_sub_epi8(rounded, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), rounded);
        codes = _mm512_abs_epi8(codes);
    }
    return _mm512_cvtepi32_ps(_mm512_madd_epi16(_mm512_maddubs_epi16(codes, rounded), _mm512_set1_epi16(1)));
#endif
}
#elif defined(__AVX2__)
typedef __m256 sum_t;

INLINE __m256 dots(block_t codes, const int8_t *x, int format) { /* eight sums of four products */
    __m256i rounded = _mm256_loadu_si256((const __m256i *)x), unsigned_codes = (__m256i)codes;
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(_mm256_setzero_si256(), unsigned_codes, rounded));
#elif defined(VNNI)
    return _mm256_cvtepi32_ps(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), unsigned_codes, rounded));
#else /* as above */
    if (format == Q8_0) {
        rounded = _mm256_sign_epi8(rounded, unsigned_codes);
        unsigned_codes = _mm256_abs_epi8(unsigned_codes);
    }
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_codes, rounded), _mm256_set1_epi16(1)));
#endif
}

INLINE sum_t add_block(sum_t sum, block_t codes, const int8_t *x, int format, float scale) {
    return _mm256_fmadd_ps(dots(codes, x, format), _mm256_set1_ps(scale), sum);
}

INLINE sum_t add_half_blocks(sum_t sum, block_t codes, const int8_t *x, int format, float first, float second) {
    return _mm256_fmadd_ps(dots(codes, x, format), _mm256_set_m128(_mm_set1_ps(second), _mm_set1_ps(first)), sum);
}
#elif defined(__ARM_FEATURE_DOTPROD)
typedef float32x4_t sum_t;

INLINE sum_t add_block(sum_t sum, block_t codes, const int8_t *x, int format, float scale) {
    int32x4_t dots = vdotq_s32(vdupq_n_s32(0), (int8x16_t)codes.half[0], vld1q_s8(x));
    dots = vdotq_s32(dots, (int8x16_t)codes.half[1], vld1q_s8(x + 16));
    return vfmaq_n_f32(sum, vcvtq_f32_s32(dots), scale);
}

INLINE sum_t add_half_blocks(sum_t sum, block_t codes, const int8_t *x, int format, float first, float second) {
    int32x4_t dots = vdotq_s32(vdupq_n_s32(0), (int8x16_t)codes.half[0], vld1q_s8(x));
    sum = vfmaq_n_f32(sum, vcvtq_f32_s32(dots), first);
    dots = vdotq_s32(vdupq_n_s32(0), (int8x16_t)codes.half[1], vld1q_s8(x + 16));
    return vfmaq_n_f32(sum, vcvtq_f32_s32(dots), second);
}
#else
typedef float sum_t __attribute__((vector_size(4)));

INLINE sum_t add_half_blocks(sum_t sum, block_t codes, const int8_t *x, int format, float first, float second) {
    int dots[2] = {0, 0};
    for (int i = 0; i < BLOCK; i++) dots[i / 16] += codes.half[i / 16][i % 16] * x[i];
    return sum + first * (float)dots[0] + second * (float)dots[1];
}

INLINE sum_t add_block(sum_t sum, block_t codes, const int8_t *x, int format, float scale) {
    return add_half_blocks(sum, codes, x, format, scale, scale);
}
#endif

typedef struct {
    sum_t products[2]; /* of codes and inputs, scaled; two, so that one addition need not wait for the last */
    floats_t reductions; /* by the minimums */
} totals_t;

INLINE floats_t load_floats(const float *values) {
    floats_t loaded;
    memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

#if defined(WIDE)
/* Pairs of blocks: a vector of scales for each, by which the sums of four products are multiplied. */
INLINE void add_products(sum_t *products, const tile_t *tile, int format, int blocks, const int8_t *codes, floats_t first, floats_t second) {
    __m512 scales = _mm512_insertf32x8(_mm512_castps256_ps512((__m256)first), (__m256)second, 1);
    int step = has_halves(format) ? BLOCKS : 0;
#pragma GCC unroll 4
    for (int pair = 0; pair < (blocks + 1) / 2; pair++) {
        int a = 2 * pair, b = a + step, c = a + 1, d = c + step;
        __m512i places = _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
        products[pair % 2] = _mm512_fmadd_ps(dots(tile->pairs[pair], codes + 2 * BLOCK * pair, format),
                                             _mm512_permutexvar_ps(places, scales), products[pair % 2]);
    }
}
#else
INLINE void add_products(sum_t *products, const tile_t *tile, int format, int blocks, const int8_t *codes, floats_t first, floats_t second) {
#pragma GCC unroll 8
    for (int block = 0; block < blocks; block++) {
        block_t weights = tile->packed ? block_codes(tile->packed, format, block) : tile->codes[block];
        const int8_t *x = codes + BLOCK * block;
        sum_t sum = products[block % 2];
        products[block % 2] = has_halves(format) ? add_half_blocks(sum, weights, x, format, value_of(first, block), value_of(second, block))
                                                 : add_block(sum, weights, x, format, value_of(first, block));
    }
}
#endif

INLINE void add_tile(totals_t *totals, const tile_t *tile, int format, int blocks, const inputs_t *x, int64_t row, int64_t start) {
    const int8_t *codes = x->codes + row * x->padded + start;
    int64_t at = (row * x->padded + start) / BLOCK;
    floats_t input_scales = load_floats(x->scales + at), first = product(tile->scales[0], input_scales), second = first;
    if (has_halves(format)) {
        second = product(tile->scales[1], input_scales);
        totals->reductions = plus_product(totals->reductions, tile->minimums[0], load_floats(x->sums[1] + at));
        totals->reductions = plus_product(totals->reductions, tile->minimums[1], load_floats(x->sums[2] + at));
    } else if (has_minimums(format))
        totals->reductions = plus_product(totals->reductions, tile->minimums[0], load_floats(x->sums[0] + at));
    add_products(totals->products, tile, format, blocks, codes, first, second);
}

INLINE float reduced(const totals_t *totals) {
#if defined(__AVX2__)
#if defined(WIDE)
    __m512 wide = _mm512_add_ps(totals->products[0], totals->products[1]);
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
#else
    __m256 eight = _mm256_add_ps(totals->products[0], totals->products[1]);
#endif
    eight = _mm256_sub_ps(eight, (__m256)totals->reductions);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#elif defined(__ARM_FEATURE_DOTPROD)
    float32x4_t subtracted = vaddq_f32(totals->reductions.half[0], totals->reductions.half[1]);
    return vaddvq_f32(vsubq_f32(vaddq_f32(totals->products[0], totals->products[1]), subtracted));
#else
    float sum = 0;
    for (unsigned i = 0; i < sizeof(sum_t) / sizeof(float); i++) sum += totals->products[0][i] + totals->products[1][i];
    for (int i = 0; i < 8; i++) sum -= value_of(totals->reductions, i);
    return sum;
#endif
}

/* ---- one output for all input rows ---- */

INLINE void one_tile(const uint8_t *data, int format, int blocks, const inputs_t *x, int64_t rows, int64_t start, totals_t *totals) {
    tile_t tile;
#if !defined(__aarch64__) /* whose caches fetch ahead themselves */
    for (int64_t line = 0; line < bytes_of_tile(format); line += CACHE_LINE) __builtin_prefetch(data + AHEAD + line);
#endif
    decode(data, format, blocks, rows == 1, &tile);
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

typedef struct {
    const matrix_t *matrices;
    int64_t count, inputs, rows, outputs, task, next; /* task: outputs of one */
    inputs_t x;
    float *out;
} job_t;

/* Long tasks read memory in long stretches, many tasks keep all threads busy. */
static int64_t task_size(int64_t outputs, int64_t threads) {
    int64_t size = outputs / (threads * TASKS_PER_THREAD);
    return size < MIN_TASK ? MIN_TASK : size > MAX_TASK ? MAX_TASK : size;
}

static void work(void *argument) {
    job_t *job = argument;
    for (;;) {
        int64_t first = __atomic_fetch_add(&job->next, job->task, __ATOMIC_RELAXED), offset = 0;
        if (first >= job->outputs) return;
        int64_t last = first + job->task < job->outputs ? first + job->task : job->outputs;
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
        job_t job = {matrices, count, inputs, some, outputs, task_size(outputs, threads), 0, rounded, out + done * outputs};
        for (int64_t row = 0; row < some; row++) round_inputs(x + (done + row) * inputs, inputs, row, &job.x);
        run_on_threads(work, &job, threads);
    }
}
