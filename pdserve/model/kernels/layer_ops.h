/* The small operations between a layer's products: each reads and writes its rows once, where torch takes a call and a
 * pass for every step. A row's result does not depend on the others.
 *
 * Every thread of a team calls them; all of it is done when one returns. */

#ifndef PDSERVE_LAYER_OPS_H
#define PDSERVE_LAYER_OPS_H

#include <math.h>
#include <stdint.h>

#include "exponential.h"

/* Sums are taken in so many parts, always the same ones, so that they vectorise without a licence to reorder. */
#define PARTS 16

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
INLINE void add_and_norm(float *x, const float *delta, const float *weight, float *normed, int64_t rows, int64_t width,
                         float eps) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *own = x + row * width, *to = normed + row * width;
        if (delta)
            for (int64_t i = 0; i < width; i++) own[i] += delta[row * width + i];
        const float factor = 1.0f / sqrtf(sum_of_squares(own, width) / (float)width + eps);
        for (int64_t i = 0; i < width; i++) to[i] = own[i] * factor * weight[i];
    }
}

/* Each head of x [rows, heads, dim], rows `stride` floats apart, over the root of its mean square, times its weight of
 * weights [heads, dim]. */
INLINE void norm_heads(float *x, int64_t stride, const float *weights, int64_t rows, int64_t heads, int64_t dim,
                       float eps) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            float *own = x + row * stride + head * dim;
            const float factor = 1.0f / sqrtf(sum_of_squares(own, dim) / (float)dim + eps);
            for (int64_t i = 0; i < dim; i++) own[i] *= factor * weights[head * dim + i];
        }
}

/* In x [rows, heads, 2 * half], rows `stride` floats apart: pairs (i, i + half) of each head turned by the row's angles,
 * cosines and sines [rows, half]. */
INLINE void rotate(float *x, int64_t stride, const float *cosines, const float *sines, int64_t rows, int64_t heads,
                   int64_t half) {
#pragma omp for schedule(static)
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

/* x without its sign, but no more than e^-x can be a normal number for. */
INLINE float held_magnitude(float x) {
    const float magnitude = fabsf(x);
    return magnitude > 87.0f ? 87.0f : magnitude;
}

/* out [rows, width] = silu(x[:, :width]) * x[:, width:] of x [rows, 2 * width]. */
INLINE void silu_and_multiply(const float *x, float *out, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = x + row * 2 * width, *up = gate + width;
        float *to = out + row * width;
        /* in a loop of its own: a compiler that sees the limit and the division at once divides for either side of it */
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = held_magnitude(gate[i]);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            const float e = exponential(-to[i]);
            to[i] = (gate[i] < 0.0f ? -to[i] * e : gate[i]) / (1.0f + e) * up[i];
        }
    }
}

#endif
