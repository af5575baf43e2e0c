/* Convolutions of Snake activations, time first: out = conv(s + sin²(s)) + bias + residual, s = x · scale + shift.

   The convolution is multiplied in the frequency domain. A block of 32 samples of a channel has 17 complex
   frequencies, two of them real; a complex product takes three real ones, so that a block is 47 points. At each point
   the channels of all blocks are multiplied by one matrix. The first 33 - taps outputs of a block are those of the
   convolution. With a dilation, the samples of a block are that far apart, and each phase has its own blocks.

   A task is a strip of blocks from its inputs to its outputs, so that what lies between stays in the cache. */

#include "kernels.h"
#include "vectors.h"

/* Rows of a tile of products: with its panel of two vectors it fills the registers. */
#if defined(__AVX512F__)
enum { TILE_ROWS = 12 };
#elif defined(__aarch64__)
enum { TILE_ROWS = 10 };
#else
enum { TILE_ROWS = 6 };
#endif
enum { PANEL_VECTORS = 2, PANEL = PANEL_VECTORS * LANES };
enum { BLOCK = 32, HALF = BLOCK / 2, QUARTER = BLOCK / 4, POINTS = 47, STRIP_ROWS = 20, ROW_CHUNK = 64 };

typedef struct {
    const float *filters; /* [point, output / PANEL, input, PANEL] */
    const float *bias;    /* [output], or NULL */
    int64_t inputs, outputs, taps, dilation;
} conv_t;

/* ---- activation ---- */

/* s + sin²(s): s minus a multiple of π (201 / 64 and two small parts), and an odd polynomial. */
INLINE vector_t snake(vector_t s) {
    vector_t turns = rounded(s * 0.318309886f);
    vector_t angle = s - turns * 3.140625f - turns * 9.67502594e-4f - turns * 1.50995803e-7f;
    vector_t square = angle * angle;
    vector_t series = square * -2.38466775e-8f + 2.75226178e-6f;
    series = series * square - 1.98408040e-4f;
    series = series * square + 8.33333050e-3f;
    series = series * square - 1.66666666e-1f;
    vector_t sine = angle + angle * square * series;
    return s + sine * sine;
}

/* Rows from `first` on, zeros before the start and behind the end.  x [time, channels] → out [rows, channels] */
static void activate(const float *x, const float *scale, const float *shift, int64_t time, int64_t channels,
                     int64_t first, int64_t rows, float *out) {
    for (int64_t row = 0; row < rows; row++, out += channels) {
        int64_t source = first + row;
        if (source < 0 || source >= time)
            memset(out, 0, sizeof(float) * channels);
        else
            for (int64_t channel = 0; channel < channels; channel += LANES)
                store(out + channel, snake(load(x + source * channels + channel) * load(scale + channel) +
                                           load(shift + channel)));
    }
}

/* ---- transforms of the samples of LANES channels ---- */

#define C1 0.98078528f
#define C2 0.92387953f
#define C3 0.83146961f
#define C4 0.70710678f
#define C5 0.55557023f
#define C6 0.38268343f
#define C7 0.19509032f

static const float COSINES[BLOCK] = {1,  C1,  C2,  C3,  C4,  C5,  C6,  C7,  0, -C7, -C6, -C5, -C4, -C3, -C2, -C1,
                                     -1, -C1, -C2, -C3, -C4, -C5, -C6, -C7, 0, C7,  C6,  C5,  C4,  C3,  C2,  C1};

INLINE float cosine(int index) { return COSINES[index & (BLOCK - 1)]; }
INLINE float sine(int index) { return COSINES[(index - QUARTER) & (BLOCK - 1)]; }

/* The samples at even and at odd places are summed on their own: one frequency is the sum of both sums, its mirror image
   their difference. The same holds for the even ones among the even ones. */
INLINE void cosine_sums(const vector_t samples[HALF + 1], vector_t sums[HALF + 1]) {
    vector_t even[QUARTER + 1];
#pragma GCC unroll 16
    for (int index = 0; index <= QUARTER / 2; index++) {
        vector_t one = samples[0], other = {};
#pragma GCC unroll 16
        for (int at = 4; at <= HALF; at += 4) one += samples[at] * cosine(index * at);
#pragma GCC unroll 16
        for (int at = 2; at < HALF; at += 4) other += samples[at] * cosine(index * at);
        even[index] = one + other, even[QUARTER - index] = one - other;
    }
#pragma GCC unroll 16
    for (int index = 0; index <= QUARTER; index++) {
        vector_t odd = {};
#pragma GCC unroll 16
        for (int at = 1; at < HALF; at += 2) odd += samples[at] * cosine(index * at);
        sums[index] = even[index] + odd, sums[HALF - index] = even[index] - odd;
    }
}

INLINE void sine_sums(const vector_t samples[HALF], vector_t sums[HALF]) {
    vector_t even[QUARTER + 1];
#pragma GCC unroll 16
    for (int index = 0; index <= QUARTER / 2; index++) {
        vector_t one = {}, other = {};
#pragma GCC unroll 16
        for (int at = 4; at < HALF; at += 4) one += samples[at] * sine(index * at);
#pragma GCC unroll 16
        for (int at = 2; at < HALF; at += 4) other += samples[at] * sine(index * at);
        even[index] = other + one, even[QUARTER - index] = other - one;
    }
#pragma GCC unroll 16
    for (int index = 1; index <= QUARTER; index++) {
        vector_t odd = {};
#pragma GCC unroll 16
        for (int at = 1; at < HALF; at += 2) odd += samples[at] * sine(index * at);
        sums[index] = odd + even[index], sums[HALF - index] = odd - even[index];
    }
}

/* 32 samples → 47 points: the two real frequencies, then of each other one real part, imaginary part and their sum. */
static void to_points(const float *samples, int64_t sample_stride, float *points, int64_t point_stride) {
    vector_t even[HALF + 1], odd[HALF], real[HALF + 1], imaginary[HALF];
    even[0] = load(samples), even[HALF] = load(samples + HALF * sample_stride);
#pragma GCC unroll 16
    for (int at = 1; at < HALF; at++) {
        vector_t one = load(samples + at * sample_stride), other = load(samples + (BLOCK - at) * sample_stride);
        even[at] = one + other, odd[at] = other - one;
    }
    cosine_sums(even, real);
    sine_sums(odd, imaginary);
    store(points, real[0]);
    store(points + point_stride, real[HALF]);
    points += 2 * point_stride;
#pragma GCC unroll 16
    for (int index = 1; index < HALF; index++, points += 3 * point_stride) {
        store(points, real[index]);
        store(points + point_stride, imaginary[index]);
        store(points + 2 * point_stride, real[index] + imaginary[index]);
    }
}

/* The products at 47 points → 32 samples, but for a factor that the filters have. */
INLINE void from_points(const float *points, int64_t point_stride, vector_t samples[BLOCK]) {
    vector_t real[HALF + 1], imaginary[HALF], even[HALF + 1], odd[HALF];
    real[0] = load(points), real[HALF] = load(points + point_stride);
    points += 2 * point_stride;
#pragma GCC unroll 16
    for (int index = 1; index < HALF; index++, points += 3 * point_stride) {
        vector_t one = load(points), other = load(points + point_stride);
        real[index] = one - other;
        imaginary[index] = load(points + 2 * point_stride) - one - other;
    }
    cosine_sums(real, even);
    sine_sums(imaginary, odd);
    samples[0] = even[0], samples[HALF] = even[HALF];
#pragma GCC unroll 16
    for (int at = 1; at < HALF; at++) samples[at] = even[at] - odd[at], samples[BLOCK - at] = even[at] + odd[at];
}

/* ---- products ---- */

/* `rows` rows by one panel of a matrix.  x [rows, inputs], panel [inputs, PANEL] → out [rows, outputs] */
INLINE void multiply_tile(const float *x, const float *panel, int64_t inputs, int64_t outputs, float *out, int rows) {
    vector_t sums[TILE_ROWS][PANEL_VECTORS] = {};
    for (int64_t input = 0; input < inputs; input++, panel += PANEL) {
        vector_t weights[PANEL_VECTORS];
        for (int part = 0; part < PANEL_VECTORS; part++) weights[part] = load(panel + part * LANES);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
            for (int part = 0; part < PANEL_VECTORS; part++) sums[row][part] += weights[part] * x[row * inputs + input];
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PANEL_VECTORS; part++) store(out + row * outputs + part * LANES, sums[row][part]);
}

static void multiply_rows(const float *x, const float *panel, int64_t inputs, int64_t outputs, float *out, int rows) {
    switch (rows) {
#define ROWS(count)                                                                                             \
    case count:                                                                                                 \
        multiply_tile(x, panel, inputs, outputs, out, count < TILE_ROWS ? count : TILE_ROWS);                   \
        break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
    }
}

/* x [rows, inputs] by a matrix [outputs / PANEL, inputs, PANEL], in tiles of about equal size → out [rows, outputs] */
static void multiply(const float *x, const float *matrix, int64_t rows, int64_t inputs, int64_t outputs, float *out) {
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t output = 0; output < outputs; output += PANEL, matrix += inputs * PANEL)
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
            multiply_rows(x + first * inputs, matrix, inputs, outputs, out + first * outputs + output,
                          (int)(last - first));
        }
}

/* ---- mean and variance over time ---- */

/* Of some rows: channel by channel the mean, the sum of squared differences from it, and the number of rows. */
INLINE int64_t part_size(int64_t channels) { return 2 * channels + 1; }

/* Sums of values, then of squared differences from their mean, of a few rows at a time; these are merged. */
static void part_moments(const float *x, int64_t rows, int64_t channels, float *part) {
    for (int64_t channel = 0; channel < channels; channel += LANES) {
        vector_t total_mean = {}, total_squares = {};
        for (int64_t first = 0; first < rows; first += ROW_CHUNK) {
            int64_t count = rows - first < ROW_CHUNK ? rows - first : ROW_CHUNK;
            const float *chunk = x + first * channels + channel;
            vector_t sum = {}, squares = {};
            for (int64_t row = 0; row < count; row++) sum += load(chunk + row * channels);
            vector_t mean = sum / (float)count;
            for (int64_t row = 0; row < count; row++) {
                vector_t away = load(chunk + row * channels) - mean;
                squares += away * away;
            }
            float share = (float)count / (float)(first + count);
            vector_t away = mean - total_mean;
            total_mean += away * share;
            total_squares += squares + away * away * ((float)first * share);
        }
        store(part + channel, total_mean);
        store(part + channels + channel, total_squares);
    }
    part[2 * channels] = (float)rows;
}

/* parts → moments [2, channels]: means and variances */
static void merge_parts(const float *parts, int64_t count, int64_t channels, float *moments) {
    for (int64_t channel = 0; channel < channels; channel++) {
        float mean = 0, squares = 0, rows = 0;
        for (int64_t index = 0; index < count; index++) {
            const float *part = parts + index * part_size(channels);
            float added = part[2 * channels], share = added / (rows + added), away = part[channel] - mean;
            mean += away * share;
            squares += part[channels + channel] + away * away * rows * share;
            rows += added;
        }
        moments[channel] = mean;
        moments[channels + channel] = squares / rows;
    }
}

/* ---- strips ---- */

typedef struct {
    const conv_t *conv;
    const float *x, *scale, *shift, *residual;
    float *out, *parts, *scratch;
    int64_t time, blocks, strips, scratch_size, next, workers;
} job_t;

INLINE int64_t fresh_samples(const conv_t *conv) { return BLOCK - conv->taps + 1; }

static int64_t block_count(const conv_t *conv, int64_t time) {
    int64_t stretch = fresh_samples(conv) * conv->dilation;
    return (time + stretch - 1) / stretch;
}

/* So many that the points of a strip stay in the cache and all threads have as much to do. */
static int64_t strip_count(const conv_t *conv, int64_t blocks, int64_t threads) {
    int64_t at_once = STRIP_ROWS / conv->dilation > 1 ? STRIP_ROWS / conv->dilation : 1;
    int64_t strips = (blocks + at_once - 1) / at_once;
    strips = (strips + threads - 1) / threads * threads;
    return strips < blocks ? strips : blocks;
}

/* Floats of a strip of so many blocks: activated samples, points and products. */
static int64_t strip_size(const conv_t *conv, int64_t blocks) {
    int64_t samples = (blocks * fresh_samples(conv) + conv->taps - 1) * conv->dilation;
    return samples * conv->inputs + POINTS * blocks * conv->dilation * (conv->inputs + conv->outputs);
}

static void convolve_strip(const job_t *job, int64_t strip, float *scratch) {
    const conv_t *conv = job->conv;
    int64_t first = job->blocks * strip / job->strips, last = job->blocks * (strip + 1) / job->strips;
    int64_t inputs = conv->inputs, outputs = conv->outputs, phases = conv->dilation, fresh = fresh_samples(conv);
    int64_t rows = (last - first) * phases, start = first * fresh * phases;
    int64_t samples = ((last - first) * fresh + conv->taps - 1) * phases;
    float *points = scratch + samples * inputs, *products = points + POINTS * rows * inputs;
    activate(job->x, job->scale, job->shift, job->time, inputs, start - conv->taps / 2 * phases, samples, scratch);
    for (int64_t row = 0; row < rows; row++) {
        const float *block = scratch + (row / phases * fresh * phases + row % phases) * inputs;
        for (int64_t channel = 0; channel < inputs; channel += LANES)
            to_points(block + channel, phases * inputs, points + row * inputs + channel, rows * inputs);
    }
    for (int64_t point = 0; point < POINTS; point++)
        multiply(points + point * rows * inputs, conv->filters + point * inputs * outputs, rows, inputs, outputs,
                 products + point * rows * outputs);
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = start + row / phases * fresh * phases + row % phases;
        int64_t left = (job->time - at + phases - 1) / phases, count = left < fresh ? left : fresh;
        for (int64_t channel = 0; channel < outputs; channel += LANES) {
            vector_t convolved[BLOCK], bias = {};
            from_points(products + row * outputs + channel, rows * outputs, convolved);
            if (conv->bias) bias = load(conv->bias + channel);
            for (int64_t index = 0; index < count; index++) {
                int64_t place = (at + index * phases) * outputs + channel;
                vector_t sum = convolved[index] + bias;
                store(job->out + place, job->residual ? sum + load(job->residual + place) : sum);
            }
        }
    }
    int64_t end = last * fresh * phases < job->time ? last * fresh * phases : job->time;
    part_moments(job->out + start * outputs, end - start, outputs, job->parts + strip * part_size(outputs));
}

static void convolve_strips(void *argument) {
    job_t *job = argument;
    float *scratch = job->scratch + __atomic_fetch_add(&job->workers, 1, __ATOMIC_RELAXED) * job->scratch_size;
    for (;;) {
        int64_t strip = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (strip >= job->strips) return;
        convolve_strip(job, strip, scratch);
    }
}

int64_t snake_conv_panel(void) { return PANEL; }

/* Floats of scratch memory. */
int64_t snake_conv_scratch(const conv_t *conv, int64_t time, int64_t threads) {
    int64_t blocks = block_count(conv, time), strips = strip_count(conv, blocks, threads);
    return threads * strip_size(conv, (blocks + strips - 1) / strips) + strips * part_size(conv->outputs);
}

/* x [time, inputs], scale and shift [inputs], residual [time, outputs] or NULL → out [time, outputs] and its moments
   [2, outputs].  inputs and outputs are multiples of PANEL, taps is odd and below BLOCK, time above 0. */
void snake_conv(const conv_t *conv, const float *x, const float *scale, const float *shift, int64_t time,
                const float *residual, float *out, float *moments, float *scratch, int64_t threads) {
    int64_t blocks = block_count(conv, time), strips = strip_count(conv, blocks, threads);
    int64_t size = strip_size(conv, (blocks + strips - 1) / strips);
    float *parts = scratch + threads * size;
    job_t job = {conv, x, scale, shift, residual, out, parts, scratch, time, blocks, strips, size};
    run_on_threads(convolve_strips, &job, threads < strips ? threads : strips);
    merge_parts(parts, strips, conv->outputs, moments);
}

/* x [time, channels], scratch [2 · channels + 1] → moments [2, channels].  channels: a multiple of LANES */
void channel_moments(const float *x, int64_t time, int64_t channels, float *moments, float *scratch) {
    part_moments(x, time, channels, scratch);
    merge_parts(scratch, 1, channels, moments);
}
