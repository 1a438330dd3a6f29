/* All layers of a dense decoder in one call, by one team of threads: what llama.py computes step by step, to the bit.
 *
 * Called one by one, the steps of a round of one row cost more to get to than to do: some ten calls a layer, each of
 * which wakes the team. Here threads only meet at the end of each step, and Python is away for the whole round.
 */

#include <omp.h>
#include <stdint.h>

#include "clock.h"
#include "layer_ops.h"
#include "paged_attention.h"
#include "quantized_linear.h"

typedef struct {
    const float *input_norm; /* [hidden] */
    const float *mlp_norm;   /* [hidden] */
    const float *qk_norm;    /* [qk_heads, head_dim], or null */
    const matrix_t *qkv;
    const matrix_t *attention_output;
    const matrix_t *gate_up;
    const matrix_t *down;
    int64_t k_offset; /* of call_t */
    int64_t v_offset;
} layer_t;

/* Where a round's time goes; also in native_layers.py. */
enum { MATRICES, ATTENTION, SMALL_STEPS, NUM_PARTS };

typedef struct {
    const layer_t *layers;
    int64_t num_layers;
    const float *final_norm; /* [hidden] */
    int64_t hidden;
    int64_t intermediate;
    int64_t qk_heads;
    float eps;
    const call_t *attention; /* as it was planned for the round; what differs by layer is filled in here */
    int64_t num_rows;
    const float *cosines; /* [num_rows, head_dim / 2] */
    const float *sines;
    float *x;      /* [num_rows, hidden]: the embeddings, and then the residual */
    float *normed; /* [num_rows, hidden]: in the end, the result */
    float *delta;  /* [num_rows, hidden] */
    float *qkv;
    float *attended;  /* [num_rows, query heads * head_dim] */
    float *gate_up;   /* [num_rows, 2 * intermediate] */
    float *gated;     /* [num_rows, intermediate] */
    activations_t *scratch; /* for the widest matrix */
    double seconds[NUM_PARTS];
} round_t;

/* What has passed since `since` went to `part`. The first thread's clock is everybody's: they meet after each step. */
INLINE void count(round_t *round, int part, double *since) {
    if (omp_get_thread_num() != 0) return;
    const double at = now();
    round->seconds[part] += at - *since;
    *since = at;
}

INLINE void multiply_all(const round_t *round, const matrix_t *matrix, const float *x, float *out) {
    multiply_matrix(matrix, x, matrix->num_in, round->num_rows, out, round->scratch);
}

INLINE void attend_layer(round_t *round, const layer_t *layer, double *since) {
    const int64_t rows = round->num_rows, dim = round->attention->head_dim, stride = layer->qkv->num_out;
    multiply_all(round, layer->qkv, round->normed, round->qkv);
    count(round, MATRICES, since);
    if (layer->qk_norm) norm_heads(round->qkv, stride, layer->qk_norm, rows, round->qk_heads, dim, round->eps);
    rotate(round->qkv, stride, round->cosines, round->sines, rows, round->qk_heads, dim / 2);
    count(round, SMALL_STEPS, since);
    call_t call = *round->attention;
    call.k_offset = layer->k_offset;
    call.v_offset = layer->v_offset;
    call.q = round->qkv;
    call.k = call.q + call.num_kv_heads * call.group * dim;
    call.v = call.k + call.num_kv_heads * dim;
    call.q_stride = call.k_stride = call.v_stride = stride;
    call.out = round->attended;
    attend(&call);
    count(round, ATTENTION, since);
    multiply_all(round, layer->attention_output, round->attended, round->delta);
    count(round, MATRICES, since);
}

INLINE void feed_forward(round_t *round, const layer_t *layer, double *since) {
    multiply_all(round, layer->gate_up, round->normed, round->gate_up);
    count(round, MATRICES, since);
    silu_and_multiply(round->gate_up, round->gated, round->num_rows, round->intermediate);
    count(round, SMALL_STEPS, since);
    multiply_all(round, layer->down, round->gated, round->delta);
    count(round, MATRICES, since);
}

INLINE void add_delta_and_norm(round_t *round, const float *delta, const float *weight, double *since) {
    add_and_norm(round->x, delta, weight, round->normed, round->num_rows, round->hidden, round->eps);
    count(round, SMALL_STEPS, since);
}

void pdserve_decoder(round_t *round, int64_t num_threads) {
#pragma omp parallel num_threads((int)num_threads)
    {
        double since = now();
        for (int64_t index = 0; index < round->num_layers; index++) {
            const layer_t *layer = round->layers + index;
            add_delta_and_norm(round, index ? round->delta : 0, layer->input_norm, &since);
            attend_layer(round, layer, &since);
            add_delta_and_norm(round, round->delta, layer->mlp_norm, &since);
            feed_forward(round, layer, &since);
        }
        add_delta_and_norm(round, round->delta, round->final_norm, &since);
    }
}
