/* All layers of a dense decoder in one call, by one team of threads: what llama.py computes step by step, to the bit.
 *
 * Called one by one, the steps of a round of one row cost more to get to than to do: some ten calls a layer, each of
 * which wakes the team. Here threads only meet at the end of each step, and Python is away for the whole round.
 *
 * Rows meet in attention only. Of few rows, threads share each matrix, so that its weights are read once. Of many, each
 * thread takes slices of them from one attention to the next, alone: what a slice is in between stays in the second
 * cache, and threads meet twice a layer.
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

/* At most, of a slice; also in native_layers.py. */
#define SLICE_ROWS 64

/* After which it is seen whether the threads had their cores. */
#define LAYERS_AT_ONCE 3
/* In a round: some times what a front takes a core for; also in team.py. */
#define MAX_SECONDS_AWAY 0.02

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
    activations_t *scratch; /* [num_rows, scratch_groups], for the widest matrix */
    int64_t scratch_groups;
    double seconds[NUM_PARTS];
    double seconds_away; /* of this round, of all threads: that they had no core, or slept until another had one */
} round_t;

/* A thread's: what it spent of the round so far, and since when it is not told. */
typedef struct {
    double seconds[NUM_PARTS];
    double since;
} stopwatch_t;

INLINE void count(stopwatch_t *watch, int part) {
    const double at = now();
    watch->seconds[part] += at - watch->since;
    watch->since = at;
}

INLINE void multiply_all(const round_t *round, const matrix_t *matrix, const float *x, float *out) {
    multiply_matrix(matrix, x, matrix->num_in, round->num_rows, out, round->scratch);
}

/* Queries, keys and values of the normed rows. */
INLINE void begin_layer(round_t *round, const layer_t *layer, stopwatch_t *watch) {
    const int64_t rows = round->num_rows, dim = round->attention->head_dim, stride = layer->qkv->num_out;
    multiply_all(round, layer->qkv, round->normed, round->qkv);
    count(watch, MATRICES);
    if (layer->qk_norm) norm_heads(round->qkv, stride, layer->qk_norm, rows, round->qk_heads, dim, round->eps);
    rotate(round->qkv, stride, round->cosines, round->sines, rows, round->qk_heads, dim / 2);
    count(watch, SMALL_STEPS);
}

INLINE void attend_layer(round_t *round, const layer_t *layer, stopwatch_t *watch) {
    call_t call = *round->attention;
    call.k_offset = layer->k_offset;
    call.v_offset = layer->v_offset;
    call.q = round->qkv;
    call.k = call.q + call.num_kv_heads * call.group * call.head_dim;
    call.v = call.k + call.num_kv_heads * call.head_dim;
    call.q_stride = call.k_stride = call.v_stride = layer->qkv->num_out;
    call.out = round->attended;
    attend(&call);
    count(watch, ATTENTION);
}

INLINE void add_delta_and_norm(round_t *round, const float *delta, const float *weight, stopwatch_t *watch) {
    add_and_norm(round->x, delta, weight, round->normed, round->num_rows, round->hidden, round->eps);
    count(watch, SMALL_STEPS);
}

/* What the attended rows come to, but for the sum with the residual, which the next norm takes. */
INLINE void end_layer(round_t *round, const layer_t *layer, stopwatch_t *watch) {
    multiply_all(round, layer->attention_output, round->attended, round->delta);
    count(watch, MATRICES);
    add_delta_and_norm(round, round->delta, layer->mlp_norm, watch);
    multiply_all(round, layer->gate_up, round->normed, round->gate_up);
    count(watch, MATRICES);
    silu_and_multiply(round->gate_up, round->gated, round->num_rows, round->intermediate);
    count(watch, SMALL_STEPS);
    multiply_all(round, layer->down, round->gated, round->delta);
    count(watch, MATRICES);
}

/* From the attention of layer `index` - 1, or the embeddings, to that of layer `index`, or the end. */
INLINE void between_attentions(round_t *round, int64_t index, stopwatch_t *watch) {
    const layer_t *layer = round->layers + index;
    const int is_first = index == 0, is_end = index == round->num_layers;
    if (!is_first) end_layer(round, layer - 1, watch);
    add_delta_and_norm(round, is_first ? 0 : round->delta, is_end ? round->final_norm : layer->input_norm, watch);
    if (!is_end) begin_layer(round, layer, watch);
}

/* A round of its own, in the thread's part of the buffers that nobody reads afterwards. */
INLINE round_t slice_of(const round_t *round, int64_t first, int64_t num_rows, int64_t thread) {
    const layer_t *layer = round->layers;
    const int64_t half = round->attention->head_dim / 2, own = thread * SLICE_ROWS;
    round_t slice = *round;
    slice.num_rows = num_rows;
    slice.cosines += first * half;
    slice.sines += first * half;
    slice.x += first * round->hidden;
    slice.normed += first * round->hidden;
    slice.qkv += first * layer->qkv->num_out;
    slice.attended += first * layer->attention_output->num_in;
    slice.delta += own * round->hidden;
    slice.gate_up += own * 2 * round->intermediate;
    slice.gated += own * round->intermediate;
    slice.scratch += own * round->scratch_groups;
    return slice;
}

/* Every thread takes the slices that are its own; in each it is a team of one. */
INLINE void slices_between_attentions(const round_t *round, int64_t index, int64_t num_slices, stopwatch_t *watch) {
    const int64_t num_blocks = (round->num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const int thread = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
    for (int64_t number = 0; number < num_slices; number++) {
        const int64_t first = number * num_blocks / num_slices * ROW_BLOCK;
        const int64_t end = smaller((number + 1) * num_blocks / num_slices * ROW_BLOCK, round->num_rows);
        round_t slice = slice_of(round, first, end - first, thread);
#pragma omp parallel num_threads(1)
        between_attentions(&slice, index, watch);
    }
}

/* As many a thread, all of about one size; none where the round has too few rows. */
INLINE int64_t num_slices_of(const round_t *round, int64_t num_threads) {
    const int64_t of_threads = num_threads * SLICE_ROWS;
    return round->num_rows < of_threads ? 0 : (round->num_rows + of_threads - 1) / of_threads * num_threads;
}

/* What the layers from `first` to `end` need, up to the attention of each; by how long all threads were off their cores. */
INLINE double run_layers(round_t *round, int64_t first, int64_t end, int64_t num_threads) {
    double away = 0.0;
#pragma omp parallel num_threads((int)num_threads) reduction(+ : away)
    {
        const int64_t num_slices = num_slices_of(round, omp_get_num_threads());
        const double began = now(), began_on_core = seconds_on_core();
        stopwatch_t watch = {.since = began};
        for (int64_t index = first; index < end; index++) {
            if (num_slices) slices_between_attentions(round, index, num_slices, &watch);
            else between_attentions(round, index, &watch);
            if (index < round->num_layers) attend_layer(round, round->layers + index, &watch);
        }
        /* one thread's is everybody's: they meet after each step */
        if (omp_get_thread_num() == 0)
            for (int part = 0; part < NUM_PARTS; part++) round->seconds[part] += watch.seconds[part];
        away = now() - began - (seconds_on_core() - began_on_core);
    }
    return away;
}

/* Threads that meet often and are kept from their cores for too long leave the rest of the round to the first one. */
void pdserve_decoder(round_t *round, int64_t num_threads) {
    const int is_sliced = num_slices_of(round, num_threads) != 0;
    round->seconds_away = 0.0;
    for (int64_t index = 0; index <= round->num_layers; index += LAYERS_AT_ONCE) {
        const int64_t end = smaller(index + LAYERS_AT_ONCE, round->num_layers + 1);
        round->seconds_away += run_layers(round, index, end, num_threads);
        if (!is_sliced && round->seconds_away > MAX_SECONDS_AWAY) num_threads = 1;
    }
}
