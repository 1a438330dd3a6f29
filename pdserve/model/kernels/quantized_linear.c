/* One product as a call of its own. */

#include "quantized_linear.h"

/* See multiply_matrix. */
void pdserve_quantized_linear(const matrix_t *matrix, const float *x, int64_t x_stride, int64_t num_rows, float *out,
                              activations_t *scratch, int64_t num_threads) {
#pragma omp parallel num_threads((int)num_threads)
    multiply_matrix(matrix, x, x_stride, num_rows, out, scratch);
}

/* What this build uses of the CPU. */
const char *pdserve_quantized_linear_instructions(void) { return INSTRUCTIONS; }
