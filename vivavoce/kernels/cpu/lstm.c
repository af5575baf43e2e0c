/* Both directions of an LSTM layer over one row, each on a thread of its own. */

#include "kernels.h"
#include "vectors.h"

#include "exponential.h"

enum { GATES = 4, PANEL_VECTORS = 8, PANEL = PANEL_VECTORS * LANES };

typedef struct {
    const float *gates[2];   /* [time, 4 · hidden]: of the inputs, with all biases */
    const float *weights[2]; /* [4 · hidden / PANEL, hidden, PANEL] */
    float *out;              /* [time, 2 · hidden] */
    float *scratch;          /* [2, 6 · hidden] */
    int64_t time, hidden, next;
} lstm_t;

static void run_direction(const lstm_t *job, int64_t direction) {
    int64_t hidden = job->hidden;
    float *state = job->scratch + direction * (GATES + 2) * hidden, *cell = state + hidden, *gates = cell + hidden;
    memset(state, 0, sizeof(float) * 2 * hidden);
    for (int64_t step = 0; step < job->time; step++) {
        int64_t at = direction ? job->time - 1 - step : step;
        const float *weights = job->weights[direction], *inputs = job->gates[direction] + at * GATES * hidden;
        for (int64_t gate = 0; gate < GATES * hidden; gate += PANEL) {
            vector_t sums[PANEL_VECTORS];
            for (int part = 0; part < PANEL_VECTORS; part++) sums[part] = load(inputs + gate + part * LANES);
            for (int64_t index = 0; index < hidden; index++, weights += PANEL)
                for (int part = 0; part < PANEL_VECTORS; part++) sums[part] += load(weights + part * LANES) * state[index];
            for (int part = 0; part < PANEL_VECTORS; part++) store(gates + gate + part * LANES, sums[part]);
        }
        float *out = job->out + (2 * at + direction) * hidden;
        for (int64_t unit = 0; unit < hidden; unit += LANES) {
            const float *gate = gates + unit; /* input, forget, cell and output gate */
            vector_t kept = sigmoid(load(gate + hidden)) * load(cell + unit);
            vector_t added = sigmoid(load(gate)) * hyperbolic_tangent(load(gate + 2 * hidden));
            vector_t output = sigmoid(load(gate + 3 * hidden)) * hyperbolic_tangent(kept + added);
            store(cell + unit, kept + added);
            store(state + unit, output);
            store(out + unit, output);
        }
    }
}

static void run_directions(void *argument) {
    lstm_t *job = argument;
    for (;;) {
        int64_t direction = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (direction > 1) return;
        run_direction(job, direction);
    }
}

int64_t lstm_panel(void) { return PANEL; }

/* 4 · hidden is a multiple of PANEL. */
void bidirectional_lstm(const float *forward_gates, const float *backward_gates, const float *forward_weights,
                        const float *backward_weights, int64_t time, int64_t hidden, float *out, float *scratch,
                        int64_t threads) {
    lstm_t job = {{forward_gates, backward_gates}, {forward_weights, backward_weights}, out, scratch, time, hidden};
    run_on_threads(run_directions, &job, threads < 2 ? threads : 2);
}
