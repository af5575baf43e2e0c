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
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));

#if defined(__ARM_FEATURE_DOTPROD) || (defined(__AVX2__) && !defined(VNNI))
enum { CENTRE = 0 }; /* codes of Q8_0 are int8 */
#else
enum { CENTRE = 128 }; /* they are uint8, as VNNI multiplies */
#endif

/* 256 weights. Formats with a scale for each 16 weights use both vectors of scales, the first one for the first half of
   each block of 32; the others only the first. */
typedef struct {
#if defined(WIDE)
    union {
        __m512i pairs[PAIRS];
        u8x32 codes[BLOCKS];
    };
#else
    u8x32 codes[BLOCKS];
#endif
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

INLINE void decode_block_scales(const uint8_t *data, int format, int blocks, tile_t *tile) {
    int stride = (int)bytes_of_tile(format) / BLOCKS;
    f32x8 scales = halves(data, stride, blocks);
    tile->scales[0] = scales;
    if (format == Q4_0) tile->minimums[0] = scales * 8;
    if (format == Q5_0) tile->minimums[0] = scales * 16;
    if (format == Q8_0) tile->minimums[0] = scales * CENTRE;
    if (format == Q4_1 || format == Q5_1) tile->minimums[0] = -halves(data + 2, stride, blocks);
}

/* Up to eight blocks of 32 weights. */
INLINE void decode_blocks(const uint8_t *data, int format, int blocks, tile_t *tile) {
    int stride = (int)bytes_of_tile(format) / BLOCKS;
    decode_block_scales(data, format, blocks, tile);
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

INLINE void decode_q6_k_scales(const uint8_t *data, tile_t *tile) {
    float scale = half(data + 208);
    uint8_t scales[2][8]; /* of int8, moved by 128 */
    for (int i = 0; i < 16; i++) scales[i % 2][i / 2] = data[192 + i] ^ 128;
    for (int part = 0; part < 2; part++) {
        tile->scales[part] = (floats(scales[part]) - 128) * scale;
        tile->minimums[part] = tile->scales[part] * 32;
    }
}

INLINE void decode_q6_k(const uint8_t *data, tile_t *tile) {
    decode_q6_k_scales(data, tile);
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
        u8x32 first = load32(data + 64 * part), second = load32(data + 64 * part + 32), high = load32(data + 128 + 32 * part);
        tile->codes[4 * part] = (first & 15) | (high & 3) << 4;
        tile->codes[4 * part + 1] = (second & 15) | (high >> 2 & 3) << 4;
        tile->codes[4 * part + 2] = first >> 4 | (high >> 4 & 3) << 4;
        tile->codes[4 * part + 3] = second >> 4 | high >> 6 << 4;
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
        return _mm512_xor_si512(codes, _mm512_set1_epi8((char)CENTRE));
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

INLINE void decode(const uint8_t *data, int format, int blocks, tile_t *tile) {
    switch (format) {
    case Q2_K: decode_q2_k(data, tile); break;
    case Q3_K: decode_q3_k(data, tile); break;
    case Q4_K: decode_q4_k_in_pairs(data, tile); break;
    case Q5_K: decode_q5_k_in_pairs(data, tile); break;
    case Q6_K: decode_q6_k_in_pairs(data, tile); break;
    default: decode_blocks_in_pairs(data, format, blocks, tile);
    }
}
#else
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
#endif
