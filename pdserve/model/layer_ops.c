/* The small operations between a layer's products: each reads and writes its rows once, where torch takes a call and a
 * pass for every step. A row's result does not depend on the others. */

#include <math.h>
#include <stdint.h>

#include "exponential.h"

/* Sums are taken in so many parts, always the same ones, so that they vectorise without a licence to reorder. */
#define PARTS 16
/* Fewer values than this are over before a second thread is awake. */
#define FEW_VALUES 32768

/* e^x, held between the powers that float32 has. */
INLINE float held_exponential(float x) {
    const float held = x < -87.0f ? -87.0f : x;
    return exponential(held > 88.0f ? 88.0f : held);
}

INLINE float sum_of_squares(const float *x, int64_t width) {
    float parts[PARTS] = {0};
    int64_t i = 0;
    for (; i + PARTS <= width; i += PARTS)
        for (int part = 0; part < PARTS; part++) parts[part] += x[i + part] * x[i + part];
    for (int part = 0; i < width; i++, part++) parts[part] += x[i] * x[i];
    float sum = 0.0f;
    for (int part = 0; part < PARTS; part++) sum += parts[part];
    return sum;
}

/* x [rows, width] += delta, where there is one; normed = x over the root of its mean square, times weight. */
void pdserve_add_and_norm(float *x, const float *delta, const float *weight, float *normed, int64_t rows,
                          int64_t width, float eps, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (rows * width > FEW_VALUES)
    for (int64_t row = 0; row < rows; row++) {
        float *own = x + row * width, *to = normed + row * width;
        if (delta)
            for (int64_t i = 0; i < width; i++) own[i] += delta[row * width + i];
        const float factor = 1.0f / sqrtf(sum_of_squares(own, width) / (float)width + eps);
        for (int64_t i = 0; i < width; i++) to[i] = own[i] * factor * weight[i];
    }
}

/* In x [rows, heads, 2 * half], rows `stride` floats apart: pairs (i, i + half) of each head turned by the row's angles,
 * cosines and sines [rows, half]. */
void pdserve_rotate(float *x, int64_t stride, const float *cosines, const float *sines, int64_t rows, int64_t heads,
                    int64_t half, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (rows * heads * half > FEW_VALUES)
    for (int64_t row = 0; row < rows; row++) {
        const float *cosine = cosines + row * half, *sine = sines + row * half;
        for (int64_t head = 0; head < heads; head++) {
            float *first = x + row * stride + head * 2 * half, *second = first + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float a = first[i], b = second[i];
                first[i] = a * cosine[i] - b * sine[i];
                second[i] = b * cosine[i] + a * sine[i];
            }
        }
    }
}

/* out [rows, width] = silu(x[:, :width]) * x[:, width:] of x [rows, 2 * width]. */
void pdserve_silu_and_multiply(const float *x, float *out, int64_t rows, int64_t width, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (rows * width > FEW_VALUES)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = x + row * 2 * width, *up = gate + width;
        float *to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = gate[i] / (1.0f + held_exponential(-gate[i])) * up[i];
    }
}
