/* GTCRN's network: the masks of short-time spectra, frame by frame, for some streams.

   A spectrum of 257 bins becomes 129 bands, two convolutions make 33 bands of 16 channels of it, and all that follows is
   on vectors of these 16 channels. Convolutions over several frames keep the frames before; weights come with their
   batch norms folded in (`audio/gtcrn_weights.py`; `audio/gtcrn.py` has the same network in numpy). */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi" /* all functions with vectors are inlined */

enum { BINS = 257, LOW = 65, HIGH = BINS - LOW, COARSE = 64, BANDS = LOW + COARSE, HALF = 65, WIDTH = 33 };
enum { LANES = 16, FEATURES = 3, NEAR = 3, TAPS = 5, BLOCKS = 3, PATHS = 2, GATES = 3 };
enum { HISTORY = 2 * (1 + 2 + 5) }; /* frames of the blocks of one side */

typedef float vector_t __attribute__((vector_size(64)));
typedef int32_t integers_t __attribute__((vector_size(64)));

/* Weights and states hold nothing but floats, so that Python can write them one after the other. */

typedef struct {
    float bias[LANES], slope;
} activation_t;

typedef struct { /* a GRU of 16 units; lanes that are no neighbours in the published network have zeros between them */
    float hidden[LANES][GATES][LANES], bias[GATES + 1][LANES]; /* reset, update, new from the input and from the state */
} cell_t;

typedef struct {
    float narrow[NEAR * LANES / 2][LANES];
    activation_t narrow_out;
    float depth[NEAR][NEAR][LANES]; /* frame, band */
    activation_t depth_out;
    float wide[LANES][LANES], wide_bias[LANES];
    float gate_input[LANES / 2][GATES][LANES];
    cell_t gate;
    float attention[LANES][LANES], attention_bias[LANES];
} block_t;

typedef struct {
    float weight[LANES][LANES], bias[LANES], scale[WIDTH][LANES], shift[WIDTH][LANES];
} mix_t;

typedef struct {
    float bands_input[2 * LANES][GATES][LANES]; /* of the band from below, and of the band from above */
    cell_t bands;
    mix_t bands_mix;
    float frames_input[LANES][GATES][LANES];
    cell_t frames;
    mix_t frames_mix;
} path_t;

typedef struct {
    float merge[HIGH][COARSE], split[COARSE][HIGH];
    float first[TAPS][NEAR * FEATURES][LANES];
    activation_t first_out;
    float second[TAPS][LANES][LANES];
    activation_t second_out;
    block_t encoder[BLOCKS], decoder[BLOCKS];
    path_t paths[PATHS];
    float second_last[TAPS][LANES][LANES];
    activation_t second_last_out;
    float last[TAPS][LANES][LANES], last_bias[LANES]; /* two lanes of it are used */
} weights_t;

typedef float frame_t[WIDTH][LANES];

typedef struct {
    frame_t encoder[HISTORY], decoder[HISTORY]; /* oldest first, block after block */
    float gates[2 * BLOCKS][LANES];
    frame_t frames[PATHS];
} state_t;

int64_t gtcrn_weights(void) { return sizeof(weights_t) / sizeof(float); }
int64_t gtcrn_state(void) { return sizeof(state_t) / sizeof(float); }

INLINE vector_t load(const float *values) {
    vector_t loaded;
    memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

INLINE void store(float *values, vector_t stored) { memcpy(values, &stored, sizeof stored); }

INLINE float total(vector_t values) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += values[i];
    return sum;
}

#include "exponential.h"

INLINE vector_t activated(vector_t x, const activation_t *out) {
    x += load(out->bias);
    return select(x >= 0.0f, x, x * out->slope);
}

/* sum += x[i] weight[i], over the inputs */
INLINE vector_t product(vector_t sum, const float *x, const float (*weight)[LANES], int inputs) {
    for (int i = 0; i < inputs; i++) sum += x[i] * load(weight[i]);
    return sum;
}

/* Three sums, of inputs or of states, to those of the gates. */
INLINE void gate_sums(vector_t sums[GATES], const float *x, const float (*weight)[GATES][LANES], int inputs) {
    for (int i = 0; i < inputs; i++)
        for (int gate = 0; gate < GATES; gate++) sums[gate] += x[i] * load(weight[i][gate]);
}

/* The state of a GRU after an input. */
INLINE void step_cell(const cell_t *cell, const float (*input)[GATES][LANES], const float *x, int inputs,
                      float *hidden) {
    vector_t from_input[GATES] = {load(cell->bias[0]), load(cell->bias[1]), load(cell->bias[2])};
    vector_t from_state[GATES] = {{0}, {0}, load(cell->bias[3])};
    gate_sums(from_input, x, input, inputs);
    gate_sums(from_state, hidden, cell->hidden, LANES);
    vector_t reset = sigmoid(from_input[0] + from_state[0]), update = sigmoid(from_input[1] + from_state[1]);
    vector_t fresh = hyperbolic_tangent(from_input[2] + reset * from_state[2]);
    store(hidden, fresh + update * (load(hidden) - fresh));
}

/* ---- from bins to bands and back ---- */

/* Magnitude, real and imaginary part of each band, each with its neighbours'. */
static void features_of(const weights_t *weights, const float (*bins)[2], float out[BANDS][NEAR * FEATURES]) {
    float parts[FEATURES][1 + BANDS + 1] = {0}, fine[FEATURES][BINS];
    for (int bin = 0; bin < BINS; bin++) {
        float real = bins[bin][0], imaginary = bins[bin][1];
        fine[0][bin] = sqrtf(real * real + imaginary * imaginary + 1e-12f);
        fine[1][bin] = real, fine[2][bin] = imaginary;
    }
    for (int part = 0; part < FEATURES; part++) {
        memcpy(parts[part] + 1, fine[part], sizeof(float) * LOW);
        for (int begin = 0; begin < COARSE; begin += LANES) {
            vector_t sum = {0};
            for (int bin = 0; bin < HIGH; bin++) sum += fine[part][LOW + bin] * load(weights->merge[bin] + begin);
            store(parts[part] + 1 + LOW + begin, sum);
        }
    }
    for (int band = 0; band < BANDS; band++)
        for (int near = 0; near < NEAR; near++)
            for (int part = 0; part < FEATURES; part++) out[band][near * FEATURES + part] = parts[part][band + near];
}

/* Multiply the bins by the complex mask of the bands. */
static void mask_bins(const weights_t *weights, float bands[BANDS][LANES], float (*bins)[2]) {
    float mask[2][BINS];
    for (int part = 0; part < 2; part++) {
        for (int band = 0; band < LOW; band++) mask[part][band] = bands[band][part];
        for (int begin = 0; begin < HIGH; begin += LANES) {
            vector_t sum = {0};
            for (int band = 0; band < COARSE; band++)
                sum += bands[LOW + band][part] * load(weights->split[band] + begin);
            store(mask[part] + LOW + begin, sum);
        }
    }
    for (int bin = 0; bin < BINS; bin++) {
        float real = bins[bin][0], imaginary = bins[bin][1];
        bins[bin][0] = real * mask[0][bin] - imaginary * mask[1][bin];
        bins[bin][1] = imaginary * mask[0][bin] + real * mask[1][bin];
    }
}

/* ---- the layers ---- */

/* A convolution over five bands with a stride of two, zeros around them. */
INLINE void halve(const float *x, int bands, int inputs, const float *weight, const activation_t *activation,
                  float (*out)[LANES]) {
    for (int to = 0; 2 * to < bands; to++) {
        vector_t sum = {0};
        for (int tap = 0; tap < TAPS; tap++) {
            int from = 2 * to + tap - 2;
            if (from < 0 || from >= bands) continue;
            const float(*of_tap)[LANES] = (const float(*)[LANES])(weight + tap * inputs * LANES);
            sum = product(sum, x + from * inputs, of_tap, inputs);
        }
        store(out[to], activated(sum, activation));
    }
}

/* The transposed convolution: `bands` become twice as many less one; without an activation yet. */
INLINE void spread(float (*x)[LANES], int bands, const float weight[TAPS][LANES][LANES], float (*out)[LANES]) {
    memset(out, 0, sizeof(float) * LANES * (2 * bands - 1));
    for (int from = 0; from < bands; from++)
        for (int tap = 0; tap < TAPS; tap++) {
            int to = 2 * from + tap - 2;
            if (to >= 0 && to < 2 * bands - 1)
                store(out[to], product(load(out[to]), x[from], weight[tap], LANES));
        }
}

/* Half of the channels through convolutions over bands and frames, weighted by their power; then both halves in turn.
   `history` has the frames before, `dilation` of them between those that count. */
static void step_block(const block_t *block, frame_t *history, int dilation, float *gate, frame_t x) {
    float padded[1 + WIDTH + 1][LANES / 2] = {{0}}, out[WIDTH][LANES];
    frame_t frame;
    for (int band = 0; band < WIDTH; band++) memcpy(padded[1 + band], x[band], sizeof padded[0]);
    for (int band = 0; band < WIDTH; band++) {
        vector_t sum = product((vector_t){0}, padded[band], block->narrow, NEAR * LANES / 2);
        store(frame[band], activated(sum, &block->narrow_out));
    }
    const frame_t *frames[NEAR] = {history, history + dilation, (const frame_t *)frame};
    vector_t power = {0};
    for (int band = 0; band < WIDTH; band++) {
        vector_t sum = {0};
        for (int past = 0; past < NEAR; past++)
            for (int near = 0; near < NEAR; near++) {
                int from = band + near - 1;
                if (from < 0 || from >= WIDTH) continue;
                sum += load((*frames[past])[from]) * load(block->depth[past][near]);
            }
        float wide[LANES];
        store(wide, activated(sum, &block->depth_out));
        sum = product(load(block->wide_bias), wide, block->wide, LANES);
        power += sum * sum;
        store(out[band], sum);
    }
    memmove(history, history + 1, sizeof(frame_t) * (2 * dilation - 1));
    memcpy(history + 2 * dilation - 1, frame, sizeof(frame_t));
    float mean[LANES];
    store(mean, power / WIDTH);
    step_cell(&block->gate, block->gate_input, mean, LANES / 2, gate);
    vector_t attention = sigmoid(product(load(block->attention_bias), gate, block->attention, LANES));
    for (int band = 0; band < WIDTH; band++) {
        float scaled[LANES], rest[LANES / 2];
        store(scaled, load(out[band]) * attention);
        memcpy(rest, x[band] + LANES / 2, sizeof rest);
        for (int channel = 0; channel < LANES / 2; channel++) {
            x[band][2 * channel] = scaled[channel];
            x[band][2 * channel + 1] = rest[channel];
        }
    }
}

/* x += norm(linear(recurrent)), the norm over all bands and channels. */
static void add_mixed(const mix_t *mix, frame_t recurrent, frame_t x) {
    vector_t sum = {0}, squares = {0};
    for (int band = 0; band < WIDTH; band++) {
        vector_t mixed = product(load(mix->bias), recurrent[band], mix->weight, LANES);
        store(recurrent[band], mixed);
        sum += mixed;
    }
    float mean = total(sum) / (WIDTH * LANES);
    for (int band = 0; band < WIDTH; band++) {
        vector_t centred = load(recurrent[band]) - mean;
        squares += centred * centred;
    }
    float scale = 1.0f / sqrtf(total(squares) / (WIDTH * LANES) + 1e-8f);
    for (int band = 0; band < WIDTH; band++) {
        vector_t normal = (load(recurrent[band]) - mean) * scale * load(mix->scale[band]) + load(mix->shift[band]);
        store(x[band], load(x[band]) + normal);
    }
}

/* A GRU along the bands in both directions, and one along the frames for each band. */
static void step_path(const path_t *path, frame_t frames, frame_t x) {
    frame_t recurrent;
    float hidden[LANES] = {0}, both[2 * LANES];
    for (int band = 0; band < WIDTH; band++) {
        int mirrored = WIDTH - 1 - band;
        memcpy(both, x[band], sizeof(float) * LANES);
        memcpy(both + LANES, x[mirrored], sizeof(float) * LANES);
        step_cell(&path->bands, path->bands_input, both, 2 * LANES, hidden);
        /* lanes: upwards of both groups, downwards of both; outputs: up and down of the first group, then the second */
        for (int unit = 0; unit < LANES / 4; unit++) {
            recurrent[band][unit] = hidden[unit];
            recurrent[mirrored][LANES / 4 + unit] = hidden[LANES / 2 + unit];
            recurrent[band][LANES / 2 + unit] = hidden[LANES / 4 + unit];
            recurrent[mirrored][3 * LANES / 4 + unit] = hidden[3 * LANES / 4 + unit];
        }
    }
    add_mixed(&path->bands_mix, recurrent, x);
    for (int band = 0; band < WIDTH; band++)
        step_cell(&path->frames, path->frames_input, x[band], LANES, frames[band]);
    memcpy(recurrent, frames, sizeof(frame_t));
    add_mixed(&path->frames_mix, recurrent, x);
}

static void add(float (*x)[LANES], float (*other)[LANES], int bands) {
    for (int band = 0; band < bands; band++) store(x[band], load(x[band]) + load(other[band]));
}

static void step_frame(const weights_t *weights, state_t *state, float (*bins)[2]) {
    static const int dilations[BLOCKS] = {1, 2, 5};
    float features[BANDS][NEAR * FEATURES], wide[HALF][LANES], spread_out[HALF][LANES], masks[BANDS][LANES];
    frame_t skipped[1 + BLOCKS], x;
    features_of(weights, (const float(*)[2])bins, features);
    halve(features[0], BANDS, NEAR * FEATURES, weights->first[0][0], &weights->first_out, wide);
    halve(wide[0], HALF, LANES, weights->second[0][0], &weights->second_out, x);
    memcpy(skipped[0], x, sizeof x);
    frame_t *history = state->encoder;
    for (int block = 0; block < BLOCKS; block++) {
        step_block(weights->encoder + block, history, dilations[block], state->gates[block], x);
        memcpy(skipped[1 + block], x, sizeof x);
        history += 2 * dilations[block];
    }
    for (int path = 0; path < PATHS; path++) step_path(weights->paths + path, state->frames[path], x);
    history = state->decoder;
    for (int block = 0; block < BLOCKS; block++) {
        int dilation = dilations[BLOCKS - 1 - block];
        add(x, skipped[BLOCKS - block], WIDTH);
        step_block(weights->decoder + block, history, dilation, state->gates[BLOCKS + block], x);
        history += 2 * dilation;
    }
    add(x, skipped[0], WIDTH);
    spread(x, WIDTH, weights->second_last, spread_out);
    for (int band = 0; band < HALF; band++)
        store(spread_out[band], activated(load(spread_out[band]), &weights->second_last_out));
    add(spread_out, wide, HALF);
    spread(spread_out, HALF, weights->last, masks);
    for (int band = 0; band < BANDS; band++)
        store(masks[band], hyperbolic_tangent(load(masks[band]) + load(weights->last_bias)));
    mask_bins(weights, masks, bins);
}

/* Mask the spectra of some streams in place, and update the states that their rows begin with.
   states [row, stride], rows [streams], spectra [streams, frames, 257, 2] */
void gtcrn_frames(const float *weights, float *states, int64_t stride, const int64_t *rows, int64_t streams,
                  int64_t frames, float *spectra) {
    for (int64_t stream = 0; stream < streams; stream++) {
        state_t *state = (state_t *)(states + rows[stream] * stride);
        for (int64_t frame = 0; frame < frames; frame++, spectra += 2 * BINS)
            step_frame((const weights_t *)weights, state, (float(*)[2])spectra);
    }
}
