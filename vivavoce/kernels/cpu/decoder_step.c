/* One new row through all layers of a Llama or Qwen decoder with packed weights, in one call: norms, products, rotation,
   the paged cache of keys and values, attention, and the gated feed-forward. */

#include <math.h>
#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi" /* all functions with vectors are inlined */
enum { LANES = 8 };
typedef float f32x8 __attribute__((vector_size(32)));

typedef struct {
    const matrix_t *matrices;
    int64_t count;
} linear_t;

typedef struct {
    const float *input_norm, *output_norm; /* [hidden] */
    const float *q_norm, *k_norm;          /* [head_dim], or NULL */
    linear_t qkv, output, gate_up, down;
} layer_t;

typedef struct {
    const layer_t *layers;
    const float *cos, *sin; /* [position, head_dim / 2] */
    int64_t count, hidden, inner, heads, kv_heads, head_dim;
    double eps;
} decoder_t;

typedef struct {
    float *keys, *values; /* [layer, page, row, kv_head, head_dim] */
    const int32_t *pages; /* those of the sequence */
    int64_t page_size, page_stride, layer_stride, position;
} cache_t;

INLINE f32x8 load(const float *values) {
    f32x8 loaded;
    memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

INLINE float total(f32x8 values) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += values[i];
    return sum;
}

/* Sizes are multiples of eight. */
static float dot(const float *one, const float *other, int64_t size) {
    f32x8 sum = {};
    for (int64_t i = 0; i < size; i += LANES) sum += load(one + i) * load(other + i);
    return total(sum);
}

static void rms_norm(const float *x, const float *weight, int64_t size, double eps, float *out) {
    float scale = (float)(1 / sqrt((double)dot(x, x, size) / (double)size + eps));
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

/* Rotate the first half of a head against the second. */
static void rotate(float *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = head[i], second = head[half + i];
        head[i] = first * cos[i] - second * sin[i];
        head[half + i] = second * cos[i] + first * sin[i];
    }
}

/* ---- attention of one row: heads are tasks ---- */

typedef struct {
    const decoder_t *decoder;
    const cache_t *cache;
    const float *queries;       /* [head, head_dim] */
    const float *keys, *values; /* of the layer */
    float *weights;             /* [head, context] */
    float *out;                 /* [head, head_dim] */
    int64_t next;
} attention_t;

static void attend_head(const attention_t *job, int64_t head) {
    const decoder_t *decoder = job->decoder;
    const cache_t *cache = job->cache;
    int64_t dim = decoder->head_dim, context = cache->position + 1, row_stride = decoder->kv_heads * dim;
    int64_t offset = head / (decoder->heads / decoder->kv_heads) * dim;
    const float *query = job->queries + head * dim;
    float *weights = job->weights + head * context, *out = job->out + head * dim;
    float scale = 1 / sqrtf((float)dim), largest = -INFINITY, sum = 0;
    for (int64_t start = 0; start < context; start += cache->page_size) {
        const float *keys = job->keys + cache->pages[start / cache->page_size] * cache->page_stride + offset;
        for (int64_t row = start; row < context && row < start + cache->page_size; row++, keys += row_stride) {
            weights[row] = dot(query, keys, dim) * scale;
            largest = weights[row] > largest ? weights[row] : largest;
        }
    }
    for (int64_t row = 0; row < context; row++) sum += weights[row] = expf(weights[row] - largest);
    memset(out, 0, sizeof(float) * dim);
    for (int64_t start = 0; start < context; start += cache->page_size) {
        const float *values = job->values + cache->pages[start / cache->page_size] * cache->page_stride + offset;
        for (int64_t row = start; row < context && row < start + cache->page_size; row++, values += row_stride)
            for (int64_t i = 0; i < dim; i++) out[i] += weights[row] * values[i];
    }
    for (int64_t i = 0; i < dim; i++) out[i] /= sum;
}

static void attend_some(void *argument) {
    attention_t *job = argument;
    for (;;) {
        int64_t head = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (head >= job->decoder->heads) return;
        attend_head(job, head);
    }
}

/* ---- the step ---- */

enum { HEADS_IN_PARALLEL = 16384 }; /* products of a head's queries and keys from which threads are worth their start */

static void attention(const decoder_t *decoder, const cache_t *cache, int64_t index, float *qkv, float *weights, float *out,
                      int64_t threads) {
    const layer_t *layer = decoder->layers + index;
    int64_t dim = decoder->head_dim, heads = decoder->heads, kv_heads = decoder->kv_heads;
    const float *cos = decoder->cos + cache->position * dim / 2, *sin = decoder->sin + cache->position * dim / 2;
    for (int64_t head = 0; head < heads + kv_heads; head++) {
        const float *norm = head < heads ? layer->q_norm : layer->k_norm;
        if (norm) rms_norm(qkv + head * dim, norm, dim, decoder->eps, qkv + head * dim);
        rotate(qkv + head * dim, cos, sin, dim / 2);
    }
    float *keys = cache->keys + index * cache->layer_stride, *values = cache->values + index * cache->layer_stride;
    int64_t place = cache->pages[cache->position / cache->page_size] * cache->page_stride +
                    cache->position % cache->page_size * kv_heads * dim;
    memcpy(keys + place, qkv + heads * dim, sizeof(float) * kv_heads * dim);
    memcpy(values + place, qkv + (heads + kv_heads) * dim, sizeof(float) * kv_heads * dim);
    attention_t job = {decoder, cache, qkv, keys, values, weights, out, 0};
    int64_t products = (cache->position + 1) * dim;
    run_on_threads(attend_some, &job, products < HEADS_IN_PARALLEL ? 1 : threads);
}

/* Floats of scratch memory for a sequence of so many rows. */
int64_t decoder_step_scratch(const decoder_t *decoder, int64_t context) {
    int64_t attended = decoder->heads * decoder->head_dim, packed = attended + 2 * decoder->kv_heads * decoder->head_dim;
    return 2 * decoder->hidden + packed + attended + 2 * decoder->inner + decoder->heads * context;
}

/* The states `x` [hidden] of the row at the cache's position, before the last norm; in place. */
void decoder_step(const decoder_t *decoder, const cache_t *cache, float *x, float *scratch, uint8_t *product_scratch,
                  int64_t threads) {
    int64_t hidden = decoder->hidden, inner = decoder->inner, attended_size = decoder->heads * decoder->head_dim;
    float *normed = scratch, *added = normed + hidden, *attended = added + hidden, *gated = attended + attended_size;
    float *qkv = gated + 2 * inner, *weights = qkv + attended_size + 2 * decoder->kv_heads * decoder->head_dim;
#define PROJECT(LINEAR, FROM, INPUTS, TO) \
    block_linear((LINEAR).matrices, (LINEAR).count, FROM, INPUTS, 1, TO, product_scratch, threads)
    for (int64_t index = 0; index < decoder->count; index++) {
        const layer_t *layer = decoder->layers + index;
        rms_norm(x, layer->input_norm, hidden, decoder->eps, normed);
        PROJECT(layer->qkv, normed, hidden, qkv);
        attention(decoder, cache, index, qkv, weights, attended, threads);
        PROJECT(layer->output, attended, attended_size, added);
        for (int64_t i = 0; i < hidden; i++) x[i] += added[i];
        rms_norm(x, layer->output_norm, hidden, decoder->eps, normed);
        PROJECT(layer->gate_up, normed, hidden, gated);
        for (int64_t i = 0; i < inner; i++) gated[i] = gated[i] / (1 + expf(-gated[i])) * gated[inner + i];
        PROJECT(layer->down, gated, inner, added);
        for (int64_t i = 0; i < hidden; i++) x[i] += added[i];
    }
#undef PROJECT
}
