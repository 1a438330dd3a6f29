/* Paged attention over a slab of KV blocks, for a batch that mixes prompt chunks and single-token rows. KV is float32 or
 * bfloat16 (a float's upper half).
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
 *
 * Chunks over bfloat16 are multiplied in pairs where the CPU has an instruction for that: queries and the softmax's
 * weights are rounded to bfloat16 too, then. Everything else is computed in float32.
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

#if defined(__AVX512BF16__)
#include <immintrin.h>
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

typedef float vec __attribute__((vector_size(VEC_BYTES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(VEC_BYTES), aligned(4), may_alias));
typedef uint16_t half_t __attribute__((may_alias));
typedef uint16_t halves __attribute__((vector_size(VEC_BYTES / 2), aligned(2), may_alias));
typedef float number_t __attribute__((may_alias)); /* a float, or two halves */

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
    int64_t is_half; /* KV is bfloat16 */
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
    const float found = exponential(x);
    return x < -87.0f ? 0.0f : found;
}

INLINE float rough_nonpositive(float x) {
    const float found = rough_exponential(x);
    return x < -87.0f ? 0.0f : found;
}

/* ------------------------------------------------------------------ bfloat16 */

/* To the nearest, the even one where two are as near. */
INLINE half_t to_half(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    return x != x ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

INLINE float from_half(half_t half) {
    const uint32_t word = (uint32_t)half << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
}

INLINE void to_halves(const float *from, float factor, int64_t count, half_t *to) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) to[i] = to_half(from[i] * factor);
}

/* Two floats rounded to halves, beside each other. They are of 0 to 1. */
INLINE uint32_t pair_of(float first, float second) {
    uint32_t low, high;
    memcpy(&low, &first, 4);
    memcpy(&high, &second, 4);
    return (low + 0x8000) >> 16 | ((high + 0x8000) & 0xffff0000);
}

/* VEC numbers, or one, of a plane. */
INLINE vec load(const int is_half, const void *plane, int64_t index) {
    if (!is_half) return *(const vec *)((const number_t *)plane + index);
    return (vec)(__builtin_convertvector(*(const halves *)((const half_t *)plane + index), bits) << 16);
}

INLINE float load_one(const int is_half, const void *plane, int64_t index) {
    return is_half ? from_half(((const half_t *)plane)[index]) : ((const number_t *)plane)[index];
}

/* ------------------------------------------------------------------ the matrix multiply both products use */

/* FLOATS: of floats. PAIRS: both sides' numbers are two halves, whose products are added up. HALF_RIGHT: the right side's
 * are halves. */
enum { FLOATS, PAIRS, HALF_RIGHT };

INLINE vec add_product(const int kind, float left, vec right, vec sum) {
#if HAS_PAIRS
    if (kind == PAIRS) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(left), (__m512bh)right);
#endif
    (void)kind;
    return sum + left * right;
}

/* c[rows, vecs] (+)= a[rows, depth] b[depth, vecs] with the accumulators in registers. kind, rows, vecs and accumulate
 * are constants at every call. a is read at i * a_row + k * a_col, so that it may be a transposed block. */
INLINE void multiply_panel(const int kind, const int rows, const int vecs, const int accumulate, int64_t depth,
                           const number_t *a, int64_t a_row, int64_t a_col, const void *b, int64_t b_row, float *c,
                           int64_t c_row) {
    vec sum[PANEL_ROWS][PANEL_VECS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vecs; j++)
            sum[i][j] = accumulate ? *(const vec *)(c + i * c_row + j * VEC) : (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec right[PANEL_VECS];
#pragma GCC unroll 8
        for (int j = 0; j < vecs; j++) right[j] = load(kind == HALF_RIGHT, b, k * b_row + j * VEC);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const float left = a[i * a_row + k * a_col];
#pragma GCC unroll 8
            for (int j = 0; j < vecs; j++) sum[i][j] = add_product(kind, left, right[j], sum[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vecs; j++) *(vec *)(c + i * c_row + j * VEC) = sum[i][j];
}

INLINE void multiply_columns(const int kind, const int vecs, const int accumulate, int64_t rows, int64_t depth,
                             const number_t *a, int64_t a_row, int64_t a_col, const void *b, int64_t b_row, float *c,
                             int64_t c_row) {
    int64_t i = 0;
#define PANEL(n) \
    multiply_panel(kind, n, vecs, accumulate, depth, a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row)
    for (; i + PANEL_ROWS <= rows; i += PANEL_ROWS) PANEL(PANEL_ROWS);
#define REST(n) \
    case n: PANEL(n); break;
    switch (rows - i) { REST(1) REST(2) REST(3) REST(4) REST(5) }
#undef REST
#undef PANEL
}

/* The right side from column j on. */
INLINE const void *columns_from(const int kind, const void *b, int64_t j) {
    return kind == HALF_RIGHT ? (const void *)((const half_t *)b + j) : (const void *)((const number_t *)b + j);
}

/* c[rows, columns] (+)= a b for columns a multiple of VEC. */
INLINE void multiply(const int kind, const int accumulate, int64_t rows, int64_t columns, int64_t depth,
                     const number_t *a, int64_t a_row, int64_t a_col, const void *b, int64_t b_row, float *c,
                     int64_t c_row) {
    int64_t j = 0;
    for (; j + PANEL_VECS * VEC <= columns; j += PANEL_VECS * VEC)
        multiply_columns(kind, PANEL_VECS, accumulate, rows, depth, a, a_row, a_col, columns_from(kind, b, j), b_row,
                         c + j, c_row);
    for (; j < columns; j += VEC)
        multiply_columns(kind, 1, accumulate, rows, depth, a, a_row, a_col, columns_from(kind, b, j), b_row, c + j,
                         c_row);
}

/* ------------------------------------------------------------------ where things lie */

INLINE int64_t number_bytes(const call_t *call) { return call->is_half ? 2 : 4; }

/* A head's numbers from `position` on, in the plane that lies so far into its block. */
INLINE const void *plane_at(const call_t *call, const int32_t *table, int64_t position, int64_t head, int64_t plane) {
    const int64_t block = table[position / call->block_size];
    const int64_t row = head * call->block_size + position % call->block_size;
    return call->slab + block * call->block_bytes + plane + row * call->head_dim * number_bytes(call);
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

INLINE void write_row(const call_t *call, char *plane, int64_t row, const float *from) {
    char *to = plane + row * call->head_dim * number_bytes(call);
    if (call->is_half) to_halves(from, 1.0f, call->head_dim, (half_t *)to);
    else memcpy(to, from, call->head_dim * 4);
}

static void write_token(const call_t *call, int64_t token) {
    const int64_t slot = call->slot_mapping[token], dim = call->head_dim;
    char *block = call->slab + slot / call->block_size * call->block_bytes;
    for (int64_t head = 0; head < call->num_kv_heads; head++) {
        const int64_t row = head * call->block_size + slot % call->block_size;
        write_row(call, block + call->k_offset, row, call->k + token * call->k_stride + head * dim);
        write_row(call, block + call->v_offset, row, call->v + token * call->v_stride + head * dim);
    }
}

/* ------------------------------------------------------------------ several tokens: lines along the lanes */

typedef struct {
    float query[MAX_HEAD_DIM][MAX_LINES] __attribute__((aligned(64))); /* PAIRS: [head_dim / 2][lines] pairs */
    float output[MAX_HEAD_DIM][MAX_LINES] __attribute__((aligned(64)));
    float scores[MAX_KEYS + 1][MAX_LINES] __attribute__((aligned(64)));
    /* keys, and then values, of a block of halves: as floats [keys, head_dim], or values as pairs [keys / 2, head_dim] */
    float unpacked[MAX_KEYS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float maximum[MAX_LINES] __attribute__((aligned(64)));
    float sum[MAX_LINES] __attribute__((aligned(64)));
    float correction[MAX_LINES] __attribute__((aligned(64)));
    int32_t position[MAX_LINES] __attribute__((aligned(64)));
} tile_t;

/* A scaled query, as one lane of the tile's. */
INLINE void load_query(const int kind, const call_t *call, const float *q, tile_t *tile, int64_t line) {
    const int64_t dim = call->head_dim;
    if (kind == PAIRS) {
        half_t rounded[MAX_HEAD_DIM] __attribute__((aligned(64)));
        to_halves(q, call->scale, dim, rounded);
        for (int64_t d = 0; d < dim / 2; d++) tile->query[d][line] = ((const number_t *)rounded)[d];
        return;
    }
    for (int64_t d = 0; d < dim; d++) tile->query[d][line] = q[d] * call->scale;
}

/* The queries, transposed once a tile; unused lanes are zeros and see every key. Returns lanes in use. */
INLINE int64_t load_tile(const int kind, const call_t *call, const item_t *item, int64_t head, tile_t *tile) {
    static const float nothing[MAX_HEAD_DIM];
    const int64_t num_lines = item->num_tokens * call->group;
    const int64_t lanes = (num_lines + VEC - 1) / VEC * VEC;
    for (int64_t line = 0; line < lanes; line++) {
        const int used = line < num_lines;
        const int64_t token = line / call->group, query_head = head * call->group + line % call->group;
        const float *q = call->q + (item->first_token + token) * call->q_stride + query_head * call->head_dim;
        load_query(kind, call, used ? q : nothing, tile, line);
        tile->position[line] = (int32_t)(item->first_position + (used ? token : item->num_tokens - 1));
        tile->maximum[line] = NO_MAXIMUM;
        tile->sum[line] = 0.0f;
    }
    for (int64_t d = 0; d < call->head_dim; d++) memset(tile->output[d], 0, lanes * 4);
    return lanes;
}

/* Scores of `num_keys` keys to weights under `maximum`, in place; their sums to `sum`. */
static void weigh(tile_t *tile, int64_t lanes, int64_t num_keys, const float *maximum, float *sum) {
    for (int64_t j = 0; j < num_keys; j++)
#pragma omp simd
        for (int64_t l = 0; l < lanes; l++) {
            const float weight = exp_nonpositive(tile->scores[j][l] - maximum[l]);
            tile->scores[j][l] = weight;
            sum[l] += weight;
        }
}

/* The same, with the weights of two keys rounded and beside each other: of keys 0 and 1 in row 0, of 2 and 3 in row 1. */
static void weigh_pairs(tile_t *tile, int64_t lanes, int64_t num_keys, const float *maximum, float *sum) {
    if (num_keys % 2)
        for (int64_t l = 0; l < lanes; l++) tile->scores[num_keys][l] = -INFINITY;
    for (int64_t j = 0; j < num_keys; j += 2) {
        const float *first = tile->scores[j], *second = tile->scores[j + 1];
        uint32_t *pairs = (uint32_t *)tile->scores[j / 2];
#pragma omp simd
        for (int64_t l = 0; l < lanes; l++) {
            const float a = rough_nonpositive(first[l] - maximum[l]), b = rough_nonpositive(second[l] - maximum[l]);
            pairs[l] = pair_of(a, b);
            sum[l] += a + b;
        }
    }
}

/* Scores to weights, with the running maximum and sum; the output so far is brought to the new maximum. */
INLINE void soften_tile(const int kind, tile_t *tile, int64_t lanes, int64_t num_keys, int64_t head_dim) {
    float next[MAX_LINES] __attribute__((aligned(64)));
    float added[MAX_LINES] __attribute__((aligned(64)));
    int changed = 0;
    memcpy(next, tile->maximum, sizeof next);
    for (int64_t j = 0; j < num_keys; j++)
#pragma omp simd
        for (int64_t l = 0; l < lanes; l++) next[l] = tile->scores[j][l] > next[l] ? tile->scores[j][l] : next[l];
    memset(added, 0, sizeof added);
    (kind == PAIRS ? weigh_pairs : weigh)(tile, lanes, num_keys, next, added);
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

/* Keys after a line's token have no weight in it. */
static void hide_later_keys(tile_t *tile, int64_t lanes, int64_t key, int64_t num_keys) {
    for (int64_t j = 0; j < num_keys; j++)
#pragma omp simd
        for (int64_t l = 0; l < lanes; l++)
            tile->scores[j][l] = key + j > tile->position[l] ? -INFINITY : tile->scores[j][l];
}

static const number_t *as_floats(const half_t *from, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++) to[i] = from_half(from[i]);
    return to;
}

/* Values of two keys beside each other; where the last has no second, its place is zeros. */
static const number_t *as_pairs(const half_t *values, int64_t num_keys, int64_t dim, float *to) {
    uint32_t *pairs = (uint32_t *)to;
    for (int64_t j = 0; j < num_keys; j += 2) {
        const half_t *first = values + j * dim, *second = first + dim;
        if (j + 1 < num_keys)
            for (int64_t d = 0; d < dim; d++) pairs[j / 2 * dim + d] = first[d] | (uint32_t)second[d] << 16;
        else
            for (int64_t d = 0; d < dim; d++) pairs[j / 2 * dim + d] = first[d];
    }
    return to;
}

/* kind: of the products, FLOATS or PAIRS. */
INLINE void attend_tile(const int kind, const int is_half, const call_t *call, const item_t *item, int64_t head) {
    tile_t tile;
    const int32_t *table = call->block_tables + item->slot * call->block_table_stride;
    const int64_t lanes = load_tile(kind, call, item, head, &tile), dim = call->head_dim;
    const int64_t numbers = kind == PAIRS ? 2 : 1; /* halves that are multiplied as one */
    for (int64_t key = item->key_begin; key < item->key_end;) {
        const int64_t num_keys = num_keys_at(call, key, item->key_end);
        const number_t *keys = plane_at(call, table, key, head, call->k_offset);
        const number_t *values = plane_at(call, table, key, head, call->v_offset);
        if (is_half && kind == FLOATS) keys = as_floats((const half_t *)keys, num_keys * dim, tile.unpacked);
        multiply(kind, 0, num_keys, lanes, dim / numbers, keys, dim / numbers, 1, tile.query[0], MAX_LINES,
                 tile.scores[0], MAX_LINES);
        if (key + num_keys - 1 > item->first_position) hide_later_keys(&tile, lanes, key, num_keys);
        soften_tile(kind, &tile, lanes, num_keys, dim);
        if (kind == PAIRS) values = as_pairs((const half_t *)values, num_keys, dim, tile.unpacked);
        else if (is_half) values = as_floats((const half_t *)values, num_keys * dim, tile.unpacked);
        multiply(kind, 1, dim, lanes, (num_keys + numbers - 1) / numbers, values, 1, dim, tile.scores[0], MAX_LINES,
                 tile.output[0], MAX_LINES);
        key += num_keys;
    }
    for (int64_t line = 0; line < item->num_tokens * call->group; line++)
        store_line(call, item, head, line, &tile.output[0][line], MAX_LINES, tile.maximum[line], tile.sum[line]);
}

static void attend_tile_of_floats(const call_t *call, const item_t *item, int64_t head) {
    attend_tile(FLOATS, 0, call, item, head);
}

static void attend_tile_of_halves(const call_t *call, const item_t *item, int64_t head) {
    if (HAS_PAIRS && call->head_dim % 2 == 0) attend_tile(PAIRS, 1, call, item, head);
    else attend_tile(FLOATS, 1, call, item, head);
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

/* b: a row of a plane. */
INLINE float dot_product(const int is_half, const float *a, const void *b, const int64_t count) {
    vec sums = {0};
    int64_t d = 0;
    for (; d + VEC <= count; d += VEC) sums += *(const vec *)(a + d) * load(is_half, b, d);
    float sum = add_lanes(sums);
    for (; d < count; d++) sum += a[d] * load_one(is_half, b, d);
    return sum;
}

/* Asks for bytes before they are needed: a block's values while its keys are read, and the next block's keys. */
INLINE void fetch(const char *from, const int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += CACHE_LINE) __builtin_prefetch(from + at);
}

/* scores[line][key] of keys, in one plane, that lie from `keys` on; `values`, `next_keys`: what is read after them. */
INLINE void score_keys(const int is_half, const float *query, int64_t num_lines, const char *keys, int64_t num_keys,
                       const char *values, const char *next_keys, const int64_t dim, float (*scores)[MAX_KEYS]) {
    const int64_t row_bytes = dim * (is_half ? 2 : 4);
    for (int64_t j = 0; j < num_keys; j++) {
        const int64_t at = j * row_bytes;
        fetch(values + at, row_bytes);
        fetch(next_keys + at, row_bytes);
        for (int64_t g = 0; g < num_lines; g++) scores[g][j] = dot_product(is_half, query + g * dim, keys + at, dim);
    }
}

INLINE void attend_single(const int is_half, const call_t *call, const item_t *item, int64_t head) {
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
        const int64_t next = key + num_keys < item->key_end ? key + num_keys : key;
        const char *keys = plane_at(call, table, key, head, call->k_offset);
        const char *values = plane_at(call, table, key, head, call->v_offset);
        const char *next_keys = plane_at(call, table, next, head, call->k_offset);
        /* the two common sizes as constants, so that the loop over the dimension unrolls */
        if (dim == 64) score_keys(is_half, query, group, keys, num_keys, values, next_keys, 64, scores);
        else if (dim == 128) score_keys(is_half, query, group, keys, num_keys, values, next_keys, 128, scores);
        else score_keys(is_half, query, group, keys, num_keys, values, next_keys, dim, scores);
        for (int64_t g = 0; g < group; g++) {
            float *line = scores[g];
            float next_maximum = maximum[g], added = 0.0f;
#pragma omp simd reduction(max : next_maximum)
            for (int64_t j = 0; j < num_keys; j++) {
                line[j] *= call->scale;
                next_maximum = line[j] > next_maximum ? line[j] : next_maximum;
            }
#pragma omp simd reduction(+ : added)
            for (int64_t j = 0; j < num_keys; j++) {
                line[j] = exp_nonpositive(line[j] - next_maximum);
                added += line[j];
            }
            const float correction = exp_nonpositive(maximum[g] - next_maximum);
            sum[g] = sum[g] * correction + added;
            maximum[g] = next_maximum;
            for (int64_t d = 0; d < dim; d++) output[g][d] *= correction;
        }
        multiply(is_half ? HALF_RIGHT : FLOATS, 1, group, vector_dim, num_keys, scores[0], MAX_KEYS, 1, values, dim,
                 output[0], MAX_HEAD_DIM);
        for (int64_t d = vector_dim; d < dim; d++)
            for (int64_t g = 0; g < group; g++)
                for (int64_t j = 0; j < num_keys; j++)
                    output[g][d] += scores[g][j] * load_one(is_half, values, j * dim + d);
        key += num_keys;
    }
    for (int64_t g = 0; g < group; g++) store_line(call, item, head, g, output[g], 1, maximum[g], sum[g]);
}

static void attend_single_of_floats(const call_t *call, const item_t *item, int64_t head) {
    attend_single(0, call, item, head);
}

static void attend_single_of_halves(const call_t *call, const item_t *item, int64_t head) {
    attend_single(1, call, item, head);
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

static void attend_item(const call_t *call, const item_t *item, int64_t head) {
    const int is_single = item->num_tokens == 1;
    if (call->is_half) (is_single ? attend_single_of_halves : attend_tile_of_halves)(call, item, head);
    else (is_single ? attend_single_of_floats : attend_tile_of_floats)(call, item, head);
}

/* By every thread of a team; all of it is done when one returns. */
INLINE void attend(const call_t *call) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < call->num_tokens; token++) write_token(call, token);
    /* head-major, so that a thread's next tile reads the keys it just read */
    const int64_t num_works = call->num_items * call->num_kv_heads;
#pragma omp for schedule(dynamic, 1)
    for (int64_t work = 0; work < num_works; work++) {
        attend_item(call, call->items + work % call->num_items, work / call->num_items);
    }
    if (call->num_merges == 0) return;
#pragma omp for schedule(static)
    for (int64_t work = 0; work < call->num_merges * call->num_kv_heads; work++)
        merge_parts(call, call->merges + work % call->num_merges, work / call->num_merges);
}

#endif
