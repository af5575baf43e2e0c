/* What the sources of this folder share. */

#include <stdint.h>

typedef struct {
    const uint8_t *data; /* [outputs, bytes of a row] */
    const float *bias;   /* [outputs], or NULL */
    int64_t outputs;
    int64_t format;
} matrix_t;

/* Bytes of scratch memory of `block_linear` for so many input rows. */
int64_t block_linear_scratch(int64_t inputs, int64_t rows);

/* out[row] = the outputs of all matrices for x[row], one after the other.  x [rows, inputs], out [rows, outputs] */
void block_linear(const matrix_t *matrices, int64_t count, const float *x, int64_t inputs, int64_t rows, float *out,
                  uint8_t *scratch, int64_t threads);

/* Run a task on so many threads: those of the OpenMP library that PyTorch has loaded, so that both share one pool. */
void run_on_threads(void (*task)(void *), void *argument, int64_t threads);
