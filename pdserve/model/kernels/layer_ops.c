/* The small operations, each as a call of its own. */

#include "layer_ops.h"

/* Fewer values than this are over before a second thread is awake. */
#define FEW_VALUES 32768

void pdserve_add_and_norm(float *x, const float *delta, const float *weight, float *normed, int64_t rows,
                          int64_t width, float eps, int64_t num_threads) {
#pragma omp parallel num_threads((int)num_threads) if (rows * width > FEW_VALUES)
    add_and_norm(x, delta, weight, normed, rows, width, eps);
}

void pdserve_norm_heads(float *x, int64_t stride, const float *weights, int64_t rows, int64_t heads, int64_t dim,
                        float eps, int64_t num_threads) {
#pragma omp parallel num_threads((int)num_threads) if (rows * heads * dim > FEW_VALUES)
    norm_heads(x, stride, weights, rows, heads, dim, eps);
}

void pdserve_rotate(float *x, int64_t stride, const float *cosines, const float *sines, int64_t rows, int64_t heads,
                    int64_t half, int64_t num_threads) {
#pragma omp parallel num_threads((int)num_threads) if (rows * heads * half > FEW_VALUES)
    rotate(x, stride, cosines, sines, rows, heads, half);
}

void pdserve_silu_and_multiply(const float *x, float *out, int64_t rows, int64_t width, int64_t num_threads) {
#pragma omp parallel num_threads((int)num_threads) if (rows * width > FEW_VALUES)
    silu_and_multiply(x, out, rows, width);
}
