/* Paged attention over a slab of KV blocks, for a batch that mixes prompt chunks and single-token rows.
 *
 * One call does a layer: it writes the batch's K and V into their blocks, then attends, reading K and V where they
 * lie. Softmax is online (one pass over the keys), accumulation is float32, every offset is 64 bits wide.
 *
 * Work is cut into items (native_cpu.py plans them once a round): the query tokens of one tile against one range of
 * keys, for one kv head. A tile's *lines* are its tokens times the query heads that share the kv head.
 *   several tokens:  the lines are the lanes of the vectors. Both products are then one small matrix multiply whose
 *                    left side is read straight from the block, and softmax needs no sum across lanes.
 *   a single token:  too few lines for that; the head dimension goes along the lanes.
 * An item that covers only a part of its tile's keys leaves (unscaled output, maximum, sum) a line in `partials`; the
 * last loop merges them.
 */

#ifndef PDSERVE_PAGED_ATTENTION_H
#define PDSERVE_PAGED_ATTENTION_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"

#define MAX_LINES 64     /* lines of a tile */
#define MAX_HEAD_DIM 256 /* both limits are checked in native_cpu.py */
#define MAX_KEYS 64      /* keys handled at a time */
#define CACHE_LINE 64

#if defined(__AVX512F__)
#define VEC_BYTES 64
#define PANEL_VECS 4 /* 6 x 4 accumulators of 32 registers */
#elif defined(__AVX__)
#define VEC_BYTES 32
#define PANEL_VECS 2 /* 6 x 2 of 16 */
#elif defined(__aarch64__)
#define VEC_BYTES 16
#define PANEL_VECS 4
#else
#define VEC_BYTES 16
#define PANEL_VECS 2
#endif
#define VEC (VEC_BYTES / 4)
#define PANEL_ROWS 6

typedef float vec __attribute__((vector_size(VEC_BYTES), aligned(4), may_alias));

typedef struct {
    int64_t first_token;    /* of the tile, in the flat batch */
    int64_t num_tokens;
    int64_t first_position; /* of first_token, in its request */
    int64_t key_begin;
    int64_t key_end;
    int64_t slot;           /* row of block_tables */
    int64_t partial;        /* line of its first partial, or -1: it covers all its tile's keys */
} item_t;

typedef struct {
    int64_t first_token;
    int64_t num_tokens;
    int64_t partial;        /* num_parts runs of lines follow each other from here */
    int64_t num_parts;
} merge_t;

typedef struct {
    char *slab;
    int64_t block_bytes;
    int64_t k_offset; /* bytes from the start of a block to this layer's planes [kv_heads, block_size, head_dim] */
    int64_t v_offset;
    int64_t block_size;
    int64_t num_kv_heads;
    int64_t group; /* query heads that share a kv head */
    int64_t head_dim;
    const float *q; /* [num_tokens, kv_heads * group, head_dim], strides in floats between tokens */
    const float *k; /* [num_tokens, kv_heads, head_dim] */
    const float *v;
    int64_t q_stride;
    int64_t k_stride;
    int64_t v_stride;
    float *out; /* [num_tokens, kv_heads * group, head_dim], contiguous */
    const int64_t *slot_mapping; /* [num_tokens] block_id * block_size + offset */
    int64_t num_tokens;
    const int32_t *block_tables;
    int64_t block_table_stride;
    const item_t *items;
    int64_t num_items;
    const merge_t *merges;
    int64_t num_merges;
    float *partials; /* [kv_heads, num_partials, head_dim + 2]: output, maximum, sum */
    int64_t num_partials;
    int64_t num_threads;
    float scale;
} call_t;

/* A maximum before the first key; finite, so that differences of two of them are 0 and not NaN. */
static const float NO_MAXIMUM = -1e30f;

/* e^x for x <= 0; 0 below -87. */
INLINE float exp_nonpositive(float x) {
    const float found = exponential(x < -87.0f ? -87.0f : x);
    return x < -87.0f ? 0.0f : found;
}

/* ------------------------------------------------------------------ the matrix multiply both products use */

/* c[rows, vecs] (+)= a[rows, depth] b[depth, vecs] with the accumulators in registers. rows, vecs and accumulate are
 * constants at every call. a is read at i * a_row + k * a_col, so that it may be a transposed block. */
INLINE void multiply_panel(const int rows, const int vecs, const int accumulate, int64_t depth, const float *a,
                           int64_t a_row, int64_t a_col, const float *b, int64_t b_row, float *c, int64_t c_row) {
    vec sum[PANEL_ROWS][PANEL_VECS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vecs; j++)
            sum[i][j] = accumulate ? *(const vec *)(c + i * c_row + j * VEC) : (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec right[PANEL_VECS];
#pragma GCC unroll 8
        for (int j = 0; j < vecs; j++) right[j] = *(const vec *)(b + k * b_row + j * VEC);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const float left = a[i * a_row + k * a_col];
#pragma GCC unroll 8
            for (int j = 0; j < vecs; j++) sum[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vecs; j++) *(vec *)(c + i * c_row + j * VEC) = sum[i][j];
}

INLINE void multiply_columns(const int vecs, const int accumulate, int64_t rows, int64_t depth, const float *a,
                             int64_t a_row, int64_t a_col, const float *b, int64_t b_row, float *c, int64_t c_row) {
    int64_t i = 0;
    for (; i + PANEL_ROWS <= rows; i += PANEL_ROWS)
        multiply_panel(PANEL_ROWS, vecs, accumulate, depth, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row);
#define REST(n) \
    case n: multiply_panel(n, vecs, accumulate, depth, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row); break;
    switch (rows - i) { REST(1) REST(2) REST(3) REST(4) REST(5) }
#undef REST
}

/* c[rows, columns] (+)= a b for columns a multiple of VEC. */
INLINE void multiply(const int accumulate, int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row,
                     int64_t a_col, const float *b, int64_t b_row, float *c, int64_t c_row) {
    int64_t j = 0;
    for (; j + PANEL_VECS * VEC <= columns; j += PANEL_VECS * VEC)
        multiply_columns(PANEL_VECS, accumulate, rows, depth, a, a_row, a_col, b + j, b_row, c + j, c_row);
    for (; j < columns; j += VEC)
        multiply_columns(1, accumulate, rows, depth, a, a_row, a_col, b + j, b_row, c + j, c_row);
}

/* ------------------------------------------------------------------ where things lie */

INLINE const float *keys_at(const call_t *call, const int32_t *table, int64_t position, int64_t head, int64_t plane) {
    const int64_t block = table[position / call->block_size];
    const char *start = call->slab + block * call->block_bytes + plane;
    return (const float *)start + (head * call->block_size + position % call->block_size) * call->head_dim;
}

/* How many keys from `position` on lie in one block, are wanted, and fit the scratch. */
INLINE int64_t num_keys_at(const call_t *call, int64_t position, int64_t key_end) {
    int64_t count = call->block_size - position % call->block_size;
    if (count > key_end - position) count = key_end - position;
    return count < MAX_KEYS ? count : MAX_KEYS;
}

INLINE float *partial_at(const call_t *call, int64_t head, int64_t line) {
    return call->partials + (head * call->num_partials + line) * (call->head_dim + 2);
}

/* The output of a line: lines of a tile are [token, query head of the group]. */
INLINE float *output_at(const call_t *call, int64_t first_token, int64_t head, int64_t line) {
    const int64_t token = first_token + line / call->group, query_head = head * call->group + line % call->group;
    return call->out + (token * call->num_kv_heads * call->group + query_head) * call->head_dim;
}

/* What an item made of a line: the answer, or a partial where other items share the line's keys. */
INLINE void store_line(const call_t *call, const item_t *item, int64_t head, int64_t line, const float *from,
                       const int64_t stride, float maximum, float sum) {
    const int64_t dim = call->head_dim;
    const int whole = item->partial < 0;
    float *to = whole ? output_at(call, item->first_token, head, line) : partial_at(call, head, item->partial + line);
    const float factor = whole ? 1.0f / sum : 1.0f;
    for (int64_t d = 0; d < dim; d++) to[d] = from[d * stride] * factor;
    if (whole) return;
    to[dim] = maximum;
    to[dim + 1] = sum;
}

static void write_token(const call_t *call, int64_t token) {
    const int64_t slot = call->slot_mapping[token], dim = call->head_dim;
    char *block = call->slab + slot / call->block_size * call->block_bytes;
    for (int64_t head = 0; head < call->num_kv_heads; head++) {
        const int64_t offset = (head * call->block_size + slot % call->block_size) * dim;
        memcpy((float *)(block + call->k_offset) + offset, call->k + token * call->k_stride + head * dim, dim * 4);
        memcpy((float *)(block + call->v_offset) + offset, call->v + token * call->v_stride + head * dim, dim * 4);
    }
}

/* ------------------------------------------------------------------ several tokens: lines along the lanes */

typedef struct {
    float query[MAX_HEAD_DIM][MAX_LINES] __attribute__((aligned(64)));
    float output[MAX_HEAD_DIM][MAX_LINES] __attribute__((aligned(64)));
    float scores[MAX_KEYS][MAX_LINES] __attribute__((aligned(64)));
    float maximum[MAX_LINES] __attribute__((aligned(64)));
    float sum[MAX_LINES] __attribute__((aligned(64)));
    float correction[MAX_LINES] __attribute__((aligned(64)));
    int32_t position[MAX_LINES] __attribute__((aligned(64)));
} tile_t;

/* Scaled queries, transposed once a tile; unused lanes are zeros and see every key. Returns lanes in use. */
static int64_t load_tile(const call_t *call, const item_t *item, int64_t head, tile_t *tile) {
    const int64_t num_lines = item->num_tokens * call->group;
    const int64_t lanes = (num_lines + VEC - 1) / VEC * VEC;
    for (int64_t line = 0; line < lanes; line++) {
        const int used = line < num_lines;
        const int64_t token = used ? line / call->group : 0, query_head = head * call->group + line % call->group;
        const float *q = call->q + (item->first_token + token) * call->q_stride + query_head * call->head_dim;
        tile->position[line] = (int32_t)(item->first_position + (used ? token : item->num_tokens - 1));
        tile->maximum[line] = NO_MAXIMUM;
        tile->sum[line] = 0.0f;
        for (int64_t d = 0; d < call->head_dim; d++) {
            tile->query[d][line] = used ? q[d] * call->scale : 0.0f;
            tile->output[d][line] = 0.0f;
        }
    }
    return lanes;
}

/* Scores to weights, with the running maximum and sum; the output so far is brought to the new maximum. */
static void soften_tile(tile_t *tile, int64_t lanes, int64_t num_keys, int64_t head_dim) {
    float next[MAX_LINES] __attribute__((aligned(64)));
    float added[MAX_LINES] __attribute__((aligned(64)));
    int changed = 0;
    memcpy(next, tile->maximum, sizeof next);
    for (int64_t j = 0; j < num_keys; j++)
#pragma omp simd
        for (int64_t l = 0; l < lanes; l++) next[l] = tile->scores[j][l] > next[l] ? tile->scores[j][l] : next[l];
    memset(added, 0, sizeof added);
    for (int64_t j = 0; j < num_keys; j++)
#pragma omp simd
        for (int64_t l = 0; l < lanes; l++) {
            const float weight = exp_nonpositive(tile->scores[j][l] - next[l]);
            tile->scores[j][l] = weight;
            added[l] += weight;
        }
#pragma omp simd reduction(| : changed)
    for (int64_t l = 0; l < lanes; l++) {
        changed |= next[l] != tile->maximum[l];
        tile->correction[l] = exp_nonpositive(tile->maximum[l] - next[l]);
        tile->sum[l] = tile->sum[l] * tile->correction[l] + added[l];
        tile->maximum[l] = next[l];
    }
    if (!changed) return;
    for (int64_t d = 0; d < head_dim; d++)
#pragma omp simd
        for (int64_t l = 0; l < lanes; l++) tile->output[d][l] *= tile->correction[l];
}

static void attend_tile(const call_t *call, const item_t *item, int64_t head) {
    tile_t tile;
    const int32_t *table = call->block_tables + item->slot * call->block_table_stride;
    const int64_t lanes = load_tile(call, item, head, &tile), dim = call->head_dim;
    for (int64_t key = item->key_begin; key < item->key_end;) {
        const int64_t num_keys = num_keys_at(call, key, item->key_end);
        multiply(0, num_keys, lanes, dim, keys_at(call, table, key, head, call->k_offset), dim, 1, tile.query[0],
                 MAX_LINES, tile.scores[0], MAX_LINES);
        if (key + num_keys - 1 > item->first_position)
            for (int64_t j = 0; j < num_keys; j++)
#pragma omp simd
                for (int64_t l = 0; l < lanes; l++)
                    tile.scores[j][l] = key + j > tile.position[l] ? -INFINITY : tile.scores[j][l];
        soften_tile(&tile, lanes, num_keys, dim);
        multiply(1, dim, lanes, num_keys, keys_at(call, table, key, head, call->v_offset), 1, dim, tile.scores[0],
                 MAX_LINES, tile.output[0], MAX_LINES);
        key += num_keys;
    }
    for (int64_t line = 0; line < item->num_tokens * call->group; line++)
        store_line(call, item, head, line, &tile.output[0][line], MAX_LINES, tile.maximum[line], tile.sum[line]);
}

/* ------------------------------------------------------------------ a single token: the head dimension along the lanes */

/* Halves added to halves, until one lane is left: added in order, as a compiler must, they would wait for each other. */
INLINE float add_lanes(vec lanes) {
    typedef float two __attribute__((vector_size(8)));
    typedef float four __attribute__((vector_size(16)));
#if VEC_BYTES >= 32
    typedef float eight __attribute__((vector_size(32)));
#if VEC_BYTES == 64
    const union { vec whole; eight part[2]; } sixteen = {lanes};
    const eight folded = sixteen.part[0] + sixteen.part[1];
#else
    const eight folded = (eight)lanes;
#endif
    const union { eight whole; four part[2]; } halves = {folded};
    const four quarter = halves.part[0] + halves.part[1];
#else
    const four quarter = (four)lanes;
#endif
    const union { four whole; two part[2]; } last = {quarter};
    const two pair = last.part[0] + last.part[1];
    return pair[0] + pair[1];
}

INLINE float dot_product(const float *a, const float *b, const int64_t count) {
    vec sums = {0};
    int64_t d = 0;
    for (; d + VEC <= count; d += VEC) sums += *(const vec *)(a + d) * *(const vec *)(b + d);
    float sum = add_lanes(sums);
    for (; d < count; d++) sum += a[d] * b[d];
    return sum;
}

/* Asks for a row of a plane before it is needed: a block's values while its keys are read, and the next block's keys. */
INLINE void fetch(const float *row, const int64_t dim) {
    for (int64_t d = 0; d < dim; d += CACHE_LINE / 4) __builtin_prefetch(row + d);
}

/* scores[line][key] of keys, in one plane, that lie from `keys` on; `values` and `next_keys`: what is read after them. */
INLINE void score_keys(const float *query, int64_t num_lines, const float *keys, int64_t num_keys, const float *values,
                       const float *next_keys, const int64_t dim, float (*scores)[MAX_KEYS]) {
    for (int64_t j = 0; j < num_keys; j++) {
        fetch(values + j * dim, dim);
        fetch(next_keys + j * dim, dim);
        for (int64_t g = 0; g < num_lines; g++) scores[g][j] = dot_product(query + g * dim, keys + j * dim, dim);
    }
}

static void attend_single(const call_t *call, const item_t *item, int64_t head) {
    float output[MAX_LINES][MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[MAX_LINES][MAX_KEYS] __attribute__((aligned(64)));
    float maximum[MAX_LINES], sum[MAX_LINES];
    const int32_t *table = call->block_tables + item->slot * call->block_table_stride;
    const int64_t dim = call->head_dim, group = call->group, vector_dim = dim / VEC * VEC;
    const float *query = call->q + item->first_token * call->q_stride + head * group * dim;
    for (int64_t g = 0; g < group; g++) {
        maximum[g] = NO_MAXIMUM;
        sum[g] = 0.0f;
        memset(output[g], 0, dim * 4);
    }
    for (int64_t key = item->key_begin; key < item->key_end;) {
        const int64_t num_keys = num_keys_at(call, key, item->key_end);
        const float *keys = keys_at(call, table, key, head, call->k_offset);
        const float *values = keys_at(call, table, key, head, call->v_offset);
        const int64_t next = key + num_keys < item->key_end ? key + num_keys : key;
        const float *next_keys = keys_at(call, table, next, head, call->k_offset);
        /* the two common sizes as constants, so that the loop over the dimension unrolls */
        if (dim == 64) score_keys(query, group, keys, num_keys, values, next_keys, 64, scores);
        else if (dim == 128) score_keys(query, group, keys, num_keys, values, next_keys, 128, scores);
        else score_keys(query, group, keys, num_keys, values, next_keys, dim, scores);
        for (int64_t g = 0; g < group; g++) {
            float *line = scores[g];
            float next = maximum[g], added = 0.0f;
#pragma omp simd reduction(max : next)
            for (int64_t j = 0; j < num_keys; j++) {
                line[j] *= call->scale;
                next = line[j] > next ? line[j] : next;
            }
#pragma omp simd reduction(+ : added)
            for (int64_t j = 0; j < num_keys; j++) {
                line[j] = exp_nonpositive(line[j] - next);
                added += line[j];
            }
            const float correction = exp_nonpositive(maximum[g] - next);
            sum[g] = sum[g] * correction + added;
            maximum[g] = next;
            for (int64_t d = 0; d < dim; d++) output[g][d] *= correction;
        }
        multiply(1, group, vector_dim, num_keys, scores[0], MAX_KEYS, 1, values, dim, output[0], MAX_HEAD_DIM);
        for (int64_t d = vector_dim; d < dim; d++)
            for (int64_t g = 0; g < group; g++)
                for (int64_t j = 0; j < num_keys; j++) output[g][d] += scores[g][j] * values[j * dim + d];
        key += num_keys;
    }
    for (int64_t g = 0; g < group; g++) store_line(call, item, head, g, output[g], 1, maximum[g], sum[g]);
}

/* ------------------------------------------------------------------ partials, and the entry */

static void merge_parts(const call_t *call, const merge_t *merge, int64_t head) {
    const int64_t num_lines = merge->num_tokens * call->group, dim = call->head_dim;
    for (int64_t line = 0; line < num_lines; line++) {
        float *out = output_at(call, merge->first_token, head, line);
        float maximum = NO_MAXIMUM, sum = 0.0f;
        for (int64_t part = 0; part < merge->num_parts; part++) {
            const float *from = partial_at(call, head, merge->partial + part * num_lines + line);
            maximum = from[dim] > maximum ? from[dim] : maximum;
        }
        memset(out, 0, dim * 4);
        for (int64_t part = 0; part < merge->num_parts; part++) {
            const float *from = partial_at(call, head, merge->partial + part * num_lines + line);
            const float weight = exp_nonpositive(from[dim] - maximum);
            sum += from[dim + 1] * weight;
            for (int64_t d = 0; d < dim; d++) out[d] += from[d] * weight;
        }
        for (int64_t d = 0; d < dim; d++) out[d] /= sum;
    }
}

/* By every thread of a team; all of it is done when one returns. */
INLINE void attend(const call_t *call) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < call->num_tokens; token++) write_token(call, token);
    /* head-major, so that a thread's next tile reads the keys it just read */
    const int64_t num_works = call->num_items * call->num_kv_heads;
#pragma omp for schedule(dynamic, 1)
    for (int64_t work = 0; work < num_works; work++) {
        const item_t *item = call->items + work % call->num_items;
        if (item->num_tokens == 1) attend_single(call, item, work / call->num_items);
        else attend_tile(call, item, work / call->num_items);
    }
    if (call->num_merges == 0) return;
#pragma omp for schedule(static)
    for (int64_t work = 0; work < call->num_merges * call->num_kv_heads; work++)
        merge_parts(call, call->merges + work % call->num_merges, work / call->num_merges);
}

#endif
