/* Tiles of 256 weights in the block formats of GGUF files, decoded to integer codes with scales and minimums of groups, so
   that weight = scale * code - minimum. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#pragma GCC diagnostic ignored "-Wpsabi" /* all functions with vectors are inlined */

#define INLINE static inline __attribute__((always_inline))
enum { TILE = 256, BLOCK = 32, BLOCKS = TILE / BLOCK, PAIRS = BLOCKS / 2 };
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WIDE /* two blocks of 32 weights in one vector */
#endif
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(WIDE))
#define VNNI /* uint8 by int8, four products in a sum of 32 bits */
#endif

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

/* What is added to the codes of Q8_0 and Q5_0: VNNI multiplies uint8. */
#if defined(__ARM_FEATURE_DOTPROD)
enum { CENTRE_8 = 0, CENTRE_5 = 0 };
#elif defined(__AVX2__) && !defined(VNNI)
enum { CENTRE_8 = 0, CENTRE_5 = 16 };
#else
enum { CENTRE_8 = 128, CENTRE_5 = 16 };
#endif

/* The codes of 32 weights, and a float for each of eight blocks: in one register, or in two. */
#if defined(__AVX2__)
typedef uint8_t block_t __attribute__((vector_size(32)));
typedef float floats_t __attribute__((vector_size(32)));
#define EACH_HALF(type, expression) return expression;
#define PART(value) value
#else
typedef struct {
    u8x16 half[2];
} block_t;
typedef struct {
    f32x4 half[2];
} floats_t;
#define EACH_HALF(type, expression)                                    \
    type made;                                                         \
    for (int part = 0; part < 2; part++) made.half[part] = expression; \
    return made;
#define PART(value) value.half[part]
#endif

INLINE block_t low_bits(block_t block, int mask) { EACH_HALF(block_t, PART(block) & (uint8_t)mask) }
INLINE block_t moved_right(block_t block, int bits) { EACH_HALF(block_t, PART(block) >> bits) }
INLINE block_t with_bits(block_t block, block_t above, int bits) { EACH_HALF(block_t, PART(block) | PART(above) << bits) }
INLINE block_t nibble_of(block_t block, int is_high) { return is_high ? moved_right(block, 4) : low_bits(block, 15); }
INLINE block_t flipped(block_t block, int mask) { EACH_HALF(block_t, PART(block) ^ (uint8_t)mask) }

INLINE floats_t times(floats_t values, float factor) { EACH_HALF(floats_t, PART(values) * factor) }
INLINE floats_t plus(floats_t values, float summand) { EACH_HALF(floats_t, PART(values) + summand) }
INLINE floats_t product(floats_t one, floats_t other) { EACH_HALF(floats_t, PART(one) * PART(other)) }
INLINE floats_t plus_product(floats_t sum, floats_t one, floats_t other) { EACH_HALF(floats_t, PART(sum) + PART(one) * PART(other)) }

INLINE float value_of(floats_t values, int block) {
#if defined(__AVX2__)
    return values[block];
#else
    return values.half[block / 4][block % 4];
#endif
}

/* 256 weights. Formats with a scale for each 16 weights use both vectors of scales, the first one for the first half of
   each block of 32; the others only the first. */
typedef struct {
#if defined(WIDE)
    union {
        __m512i pairs[PAIRS];
        block_t codes[BLOCKS];
    };
#else
    block_t codes[BLOCKS];
    const uint8_t *packed; /* where codes are decoded when they are multiplied, or NULL */
#endif
    floats_t scales[2], minimums[2];
} tile_t;

INLINE int has_halves(int format) { return format == Q2_K || format == Q3_K || format == Q6_K; }

INLINE int has_minimums(int format) { return !(format == Q8_0 && CENTRE_8 == 0) && !(format == Q5_0 && CENTRE_5 == 0); }

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

INLINE u8x16 load16(const uint8_t *bytes) {
    u8x16 loaded;
    memcpy(&loaded, bytes, sizeof loaded);
    return loaded;
}

INLINE block_t joined(u8x16 first, u8x16 second) {
#if defined(__AVX2__)
    return (block_t)_mm256_set_m128i((__m128i)second, (__m128i)first);
#else
    return (block_t){{first, second}};
#endif
}

INLINE block_t load32(const uint8_t *bytes) {
#if defined(__AVX2__)
    return (block_t)_mm256_loadu_si256((const __m256i *)bytes);
#else
    return joined(load16(bytes), load16(bytes + 16));
#endif
}

/* The low halves of 16 bytes, then the high halves. */
INLINE block_t nibbles(const uint8_t *bytes) {
    u8x16 packed = load16(bytes);
    return joined(packed & 15, packed >> 4);
}

#if defined(__aarch64__)
/* 255 where the bit is set, else 0; the bits are in each lane. */
INLINE block_t where_set(uint32x4_t bits) {
    const uint8x16_t places = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    const uint8x16_t others = {2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3};
    const uint8x16_t masks = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t bytes = vreinterpretq_u8_u32(bits);
    return joined((u8x16)vtstq_u8(vqtbl1q_u8(bytes, places), masks), (u8x16)vtstq_u8(vqtbl1q_u8(bytes, others), masks));
}
#endif

/* 16 where the bit is set, else 0. */
INLINE block_t fifth_bits(const uint8_t *bytes) {
    uint32_t bits;
    memcpy(&bits, bytes, 4);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (block_t)_mm256_maskz_set1_epi8(bits, 16);
#elif defined(__aarch64__)
    return low_bits(where_set(vdupq_n_u32(bits)), 16);
#else
    const u32x8 shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    u32x8 fours = (((u32x8){} + bits) >> shifts) & 15;
    fours = (fours * 0x204081 & 0x01010101) << 4;
    return load32((const uint8_t *)&fours);
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
INLINE floats_t halves(const uint8_t *bytes, int stride, int count) {
    floats_t values = {};
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
    values = (floats_t)_mm256_cvtph_ps(bits);
#elif defined(__aarch64__)
    uint16x8_t bits = vdupq_n_u16(0);
#define INSERT(INDEX) \
    if (count > INDEX) bits = vld1q_lane_u16((const uint16_t *)(bytes + INDEX * stride), bits, INDEX);
    INSERT(0) INSERT(1) INSERT(2) INSERT(3) INSERT(4) INSERT(5) INSERT(6) INSERT(7)
#undef INSERT
    float16x8_t both = vreinterpretq_f16_u16(bits);
    values = (floats_t){{vcvt_f32_f16(vget_low_f16(both)), vcvt_high_f32_f16(both)}};
#else
    for (int i = 0; i < count; i++) values.half[i / 4][i % 4] = half(bytes + i * stride);
#endif
    return values;
}

/* Eight small integers as floats. */
INLINE floats_t floats(const uint8_t *integers) {
#if defined(__AVX2__)
    return (floats_t)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)integers)));
#elif defined(__aarch64__)
    uint16x8_t wide = vmovl_u8(vld1_u8(integers));
    return (floats_t){{vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide))}};
#else
    floats_t values;
    for (int i = 0; i < 8; i++) values.half[i / 4][i % 4] = integers[i];
    return values;
#endif
}

INLINE void decode_block_scales(const uint8_t *data, int format, int blocks, tile_t *tile) {
    int stride = (int)bytes_of_tile(format) / BLOCKS;
    floats_t scales = halves(data, stride, blocks);
    tile->scales[0] = scales;
    if (format == Q4_0) tile->minimums[0] = times(scales, 8);
    if (format == Q5_0) tile->minimums[0] = times(scales, CENTRE_5);
    if (format == Q8_0) tile->minimums[0] = times(scales, CENTRE_8);
    if (format == Q4_1 || format == Q5_1) tile->minimums[0] = times(halves(data + 2, stride, blocks), -1);
}

INLINE void decode_q2_k_scales(const uint8_t *data, tile_t *tile) {
    float scale = half(data + 80), minimum = half(data + 82);
    uint8_t scales[2][8], minimums[2][8];
    for (int i = 0; i < 16; i++) {
        scales[i % 2][i / 2] = data[i] & 15;
        minimums[i % 2][i / 2] = data[i] >> 4;
    }
    for (int part = 0; part < 2; part++) {
        tile->scales[part] = times(floats(scales[part]), scale);
        tile->minimums[part] = times(floats(minimums[part]), minimum);
    }
}

INLINE void decode_q3_k_scales(const uint8_t *data, tile_t *tile) {
    const uint8_t *packed = data + 96;
    float scale = half(data + 108);
    uint8_t scales[2][8];
    for (int i = 0; i < 16; i++) {
        int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4, high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
        scales[i % 2][i / 2] = (uint8_t)(low | high << 4);
    }
    for (int part = 0; part < 2; part++) {
        tile->scales[part] = times(plus(floats(scales[part]), -32), scale);
        tile->minimums[part] = times(tile->scales[part], 4);
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
    tile->scales[0] = times(floats((const uint8_t *)&both), half(data));
    both = minimums[0] | (uint64_t)minimums[1] << 32;
    tile->minimums[0] = times(floats((const uint8_t *)&both), half(data + 2));
}

INLINE void decode_q6_k_scales(const uint8_t *data, tile_t *tile) {
    float scale = half(data + 208);
    uint8_t scales[2][8]; /* of int8, moved by 128 */
    for (int i = 0; i < 16; i++) scales[i % 2][i / 2] = data[192 + i] ^ 128;
    for (int part = 0; part < 2; part++) {
        tile->scales[part] = times(plus(floats(scales[part]), -128), scale);
        tile->minimums[part] = times(tile->scales[part], 32);
    }
}

INLINE void decode_scales(const uint8_t *data, int format, int blocks, tile_t *tile) {
    switch (format) {
    case Q2_K: decode_q2_k_scales(data, tile); break;
    case Q3_K: decode_q3_k_scales(data, tile); break;
    case Q4_K:
    case Q5_K: decode_k_scales(data, tile); break;
    case Q6_K: decode_q6_k_scales(data, tile); break;
    default: decode_block_scales(data, format, blocks, tile);
    }
}

/* From bits and nibbles. */
INLINE block_t q5_0_codes(const uint8_t *bytes) {
#if defined(__ARM_FEATURE_DOTPROD) /* a code of which the bit is not set gets the upper half of -16 */
    block_t unset = where_set(vmvnq_u32(vld1q_dup_u32((const uint32_t *)bytes)));
    uint8x16_t packed = vld1q_u8(bytes + 4);
    return joined((u8x16)vsliq_n_u8(packed, unset.half[0], 4), (u8x16)vsliq_n_u8(vshrq_n_u8(packed, 4), unset.half[1], 4));
#else
    return with_bits(nibbles(bytes + 4), fifth_bits(bytes), 0);
#endif
}

/* The codes of one block of a tile. */
INLINE block_t block_codes(const uint8_t *data, int format, int block) {
    const uint8_t *own = data + block * bytes_of_tile(format) / BLOCKS; /* of formats without K */
    int part = block / 4, place = block % 4, is_odd = block % 2;
    switch (format) {
    case Q4_0: return nibbles(own + 2);
    case Q4_1: return nibbles(own + 4);
    case Q5_0: return q5_0_codes(own + 2);
    case Q5_1: return with_bits(nibbles(own + 8), fifth_bits(own + 4), 0);
    case Q8_0: return flipped(load32(own + 2), CENTRE_8);
    case Q2_K: return low_bits(moved_right(load32(data + 16 + 32 * part), 2 * place), 3);
    case Q3_K: {
        block_t low = low_bits(moved_right(load32(data + 32 + 32 * part), 2 * place), 3);
        return with_bits(low, low_bits(moved_right(load32(data), block), 1), 2);
    }
    case Q4_K: return nibble_of(load32(data + 16 + 32 * (block / 2)), is_odd);
    case Q5_K: {
        block_t low = nibble_of(load32(data + 48 + 32 * (block / 2)), is_odd);
        return with_bits(low, low_bits(moved_right(load32(data + 16), block), 1), 4);
    }
    default: {
        block_t low = nibble_of(load32(data + 64 * part + 32 * is_odd), place / 2);
        return with_bits(low, low_bits(moved_right(load32(data + 128 + 32 * part), 2 * place), 3), 4);
    }
    }
}

#if defined(WIDE)
/* Bits of 16 or 32 bytes, moved right by `low` in the first half of each block or pair, and by `high` in the second. */
INLINE __m512i moved(__m512i packed, int low, int high, int is_pair) {
    __m512i first = _mm512_set1_epi16((short)low);
    return _mm512_srlv_epi16(packed, _mm512_mask_set1_epi16(first, is_pair ? 0xffff0000u : 0xff00ff00u, (short)high));
}

INLINE __m512i twice(const uint8_t *bytes) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)bytes)); }

/* The codes of two blocks; where there is only one, `second` is the first as well, and its inputs are 0. */
INLINE __m512i decode_pair(const uint8_t *first, const uint8_t *second, int format) {
    if (format == Q8_0) {
        __m512i codes = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(first + 2)));
        codes = _mm512_inserti64x4(codes, _mm256_loadu_si256((const __m256i *)(second + 2)), 1);
        return _mm512_xor_si512(codes, _mm512_set1_epi8((char)CENTRE_8));
    }
    int has_fifth = format == Q5_0 || format == Q5_1, scales = format == Q4_1 || format == Q5_1 ? 4 : 2;
    int offset = scales + (has_fifth ? 4 : 0);
    __m512i packed = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(first + offset)));
    packed = _mm512_mask_broadcast_i32x4(packed, 0xff00, _mm_loadu_si128((const __m128i *)(second + offset)));
    __m512i codes = _mm512_and_si512(moved(packed, 0, 4, 0), _mm512_set1_epi8(15));
    if (!has_fifth) return codes;
    uint32_t bits[2];
    memcpy(bits, first + scales, 4);
    memcpy(bits + 1, second + scales, 4);
    return _mm512_mask_add_epi8(codes, bits[0] | (uint64_t)bits[1] << 32, codes, _mm512_set1_epi8(16));
}

INLINE void decode_blocks_in_pairs(const uint8_t *data, int format, int blocks, tile_t *tile) {
    int stride = (int)bytes_of_tile(format) / BLOCKS;
    decode_block_scales(data, format, blocks, tile);
#pragma GCC unroll 4
    for (int block = 0; block < blocks; block += 2, data += 2 * stride)
        tile->pairs[block / 2] = decode_pair(data, block + 1 < blocks ? data + stride : data, format);
}

INLINE void decode_q4_k_in_pairs(const uint8_t *data, tile_t *tile) {
    decode_k_scales(data, tile);
#pragma GCC unroll 4
    for (int pair = 0; pair < PAIRS; pair++)
        tile->pairs[pair] = _mm512_and_si512(moved(twice(data + 16 + 32 * pair), 0, 4, 1), _mm512_set1_epi8(15));
}

INLINE void decode_q5_k_in_pairs(const uint8_t *data, tile_t *tile) {
    __m512i fifth = twice(data + 16), one = _mm512_set1_epi8(1);
    decode_k_scales(data, tile);
#pragma GCC unroll 4
    for (int pair = 0; pair < PAIRS; pair++) {
        __m512i low = _mm512_and_si512(moved(twice(data + 48 + 32 * pair), 0, 4, 1), _mm512_set1_epi8(15));
        __m512i high = _mm512_and_si512(moved(fifth, 2 * pair, 2 * pair + 1, 1), one);
        tile->pairs[pair] = _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
    }
}

INLINE void decode_q6_k_in_pairs(const uint8_t *data, tile_t *tile) {
    decode_q6_k_scales(data, tile);
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
        __m512i packed = _mm512_loadu_si512(data + 64 * part), high = twice(data + 128 + 32 * part);
        __m512i low = _mm512_set1_epi8(15), two = _mm512_set1_epi8(3);
        for (int half = 0; half < 2; half++) {
            __m512i above = _mm512_and_si512(moved(high, 4 * half, 4 * half + 2, 1), two);
            __m512i below = _mm512_and_si512(half ? _mm512_srli_epi16(packed, 4) : packed, low);
            tile->pairs[2 * part + half] = _mm512_or_si512(below, _mm512_slli_epi16(above, 4));
        }
    }
}

INLINE void decode(const uint8_t *data, int format, int blocks, int is_used_once, tile_t *tile) {
    (void)is_used_once;
    switch (format) {
    case Q2_K:
    case Q3_K:
        decode_scales(data, format, BLOCKS, tile);
#pragma GCC unroll 8
        for (int block = 0; block < BLOCKS; block++) tile->codes[block] = block_codes(data, format, block);
        break;
    case Q4_K: decode_q4_k_in_pairs(data, tile); break;
    case Q5_K: decode_q5_k_in_pairs(data, tile); break;
    case Q6_K: decode_q6_k_in_pairs(data, tile); break;
    default: decode_blocks_in_pairs(data, format, blocks, tile);
    }
}
#else
INLINE void decode(const uint8_t *data, int format, int blocks, int is_used_once, tile_t *tile) {
    decode_scales(data, format, blocks, tile);
    tile->packed = is_used_once ? data : NULL;
    if (is_used_once) return;
#pragma GCC unroll 8
    for (int block = 0; block < blocks; block++) tile->codes[block] = block_codes(data, format, block);
}
#endif
