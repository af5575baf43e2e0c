/* The exponential function, and what is made of it, of vectors: `vector_t` of floats, `integers_t` of as many integers. */

INLINE vector_t select(integers_t mask, vector_t yes, vector_t no) {
    return (vector_t)(((integers_t)yes & mask) | ((integers_t)no & ~mask));
}

/* A power of two by its bits, times the series of the rest; the exponent is bounded, so that both exist. */
INLINE vector_t exponential(vector_t x) {
    x = select(x > 87.0f, x * 0 + 87.0f, select(x < -87.0f, x * 0 - 87.0f, x));
    vector_t whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds to the nearest integer */
    vector_t rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vector_t sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 0.5f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (vector_t)((__builtin_convertvector(whole, integers_t) + 127) << 23);
}

INLINE vector_t sigmoid(vector_t x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE vector_t hyperbolic_tangent(vector_t x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }
