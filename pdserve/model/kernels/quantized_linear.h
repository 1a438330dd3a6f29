/* x -> x w^T + bias for a matrix of 4 or 8 bits, whose activations are brought to 8 bits on the way.
 *
 * Weights and activations are quantised in groups of GROUP values along the inner dimension:
 *   w = scale * code + minimum     code: 4 or 8 bits, unsigned
 *   x = scale' * code'             code': -127 to 127, one scale a row and group
 *   y = sum over groups of  scale * scale' * sum(code * code')  +  minimum * scale' * sum(code')
 * The two inner sums are of integers, so exact: every build finds the same ones, whatever the CPU has. The outer one
 * is in float32, group by group in order, for every number of rows and threads: a row's result is the same bits
 * whoever shares its call.
 *
 * The work is written for one team of threads, all of which call `multiply_matrix`: a product of its own
 * (quantized_linear.c) or a step among others (decoder.c).
 *
 * Weights lie in tiles of TILE output columns (quantized_linear.py lays them out). In a tile, group by group:
 *   scales    TILE halves (IEEE 754 binary16)
 *   minimums  TILE halves
 *   codes     8 sub-blocks of 4 inner values x TILE columns, column-major: the 4 bytes of a column lie together, as
 *             the dot-product instructions want them. With 4 bits, two sub-blocks share a vector: the even one has the
 *             low halves of the bytes, the odd one the high halves.
 */

#ifndef PDSERVE_QUANTIZED_LINEAR_H
#define PDSERVE_QUANTIZED_LINEAR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "inline.h"

#define GROUP 32
#define TILE 16
#define SUB_BLOCKS (GROUP / 4)
#define SUB_BLOCK_BYTES (4 * TILE)
#define SCALE_BYTES (2 * TILE * 2)
#define GROUP_BYTES(bits) (SCALE_BYTES + (bits) * GROUP * TILE / 8)

/* Rows multiplied together, which unpack the weights once; also in quantized_linear.py, for the scratch's size. */
#define ROW_BLOCK 8
/* How far ahead weights are asked for: with few rows the product waits for them, and the CPU alone asks too late. */
#define PREFETCH_BYTES 4096
/* Row blocks whose activations stay in the second cache while all tiles pass them. */
#define CHUNK_BLOCKS 32
/* A group of less than this counts as zeros: its scale would be denormal, the reciprocal infinite. */
#define SMALLEST_ACTIVATION 1e-35f

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define INSTRUCTIONS "avx512-vnni"
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#if defined(__AVXVNNI__)
#define INSTRUCTIONS "avx-vnni"
#else
#define INSTRUCTIONS "avx2"
#endif
#define LANES 8
#else
#define INSTRUCTIONS "plain"
#define LANES 4
#endif
#if LANES > 4
#include <immintrin.h>
#endif

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t chars __attribute__((vector_size(LANES)));
typedef int16_t shorts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    const char *tiles; /* [num_tiles, num_groups, GROUP_BYTES(bits)] */
    const float *bias; /* [num_tiles * TILE], or null */
    int64_t bits;
    int64_t num_in;
    int64_t num_out;
    int64_t num_groups; /* num_in / GROUP and num_out / TILE, rounded up; what is beyond is zeros */
    int64_t num_tiles;
} matrix_t;

/* A group of a row's activations. */
typedef struct {
    int8_t codes[GROUP];
    float scale;
    float sum; /* scale * sum of the codes */
} activations_t;

/* ------------------------------------------------------------------ what differs between CPUs */

/* to_floats: LANES halves. to_nearest: integers, the even one where two are as near. multiply_add: a * b + c.
 * dot: sum + the products of 4 unsigned weights and 4 signed activations in each lane, added up. */
#if LANES == 16

INLINE floats to_floats(const char *halves) {
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)halves));
}

INLINE ints to_nearest(floats x) { return (ints)_mm512_cvtps_epi32((__m512)x); }

INLINE floats multiply_add(floats a, floats b, floats c) {
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

INLINE ints dot(const int bits, ints sum, words weights, int32_t activations) {
    (void)bits;
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(activations));
}

#elif LANES == 8

INLINE floats to_floats(const char *halves) { return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)halves)); }

INLINE ints to_nearest(floats x) { return (ints)_mm256_cvtps_epi32((__m256)x); }

INLINE floats multiply_add(floats a, floats b, floats c) {
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

INLINE ints dot(const int bits, ints sum, words weights, int32_t activations) {
    const __m256i four = _mm256_set1_epi32(activations);
#if defined(__AVXVNNI__)
    (void)bits;
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, four);
#else
    /* The sum of two products must fit 16 bits: of 4-bit weights it does (15 * 127 * 2), others are widened first. */
    if (bits == 4) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, four);
        return sum + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd = _mm256_srai_epi16(four, 8);
    return sum + (ints)_mm256_madd_epi16((__m256i)(weights & 0x00ff00ff), even) +
           (ints)_mm256_madd_epi16((__m256i)(weights >> 8 & 0x00ff00ff), odd);
#endif
}

#else

INLINE floats to_floats(const char *halves) {
    floats found;
    for (int lane = 0; lane < LANES; lane++) {
        uint16_t half;
        memcpy(&half, halves + 2 * lane, 2);
        /* The bits in a float's places are the number times 2^-112, as the exponents' zeros differ by that. */
        const uint32_t bits = (uint32_t)(half & 0x7fff) << 13 | (uint32_t)(half & 0x8000) << 16;
        float small;
        memcpy(&small, &bits, 4);
        found[lane] = small * 0x1p112f;
    }
    return found;
}

INLINE ints to_nearest(floats x) {
    ints found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = (int32_t)rintf(x[lane]);
    return found;
}

INLINE floats multiply_add(floats a, floats b, floats c) { return a * b + c; }

INLINE ints dot(const int bits, ints sum, words weights, int32_t activations) {
    (void)bits;
    /* One product fits 16 bits (255 * 127): 0 and 2 of each lane at once, then 1 and 3. */
    const words four = (words){0} + (uint32_t)activations;
    const shorts even = (shorts)(weights & 0x00ff00ff) * ((shorts)four << 8 >> 8);
    const shorts odd = (shorts)(weights >> 8 & 0x00ff00ff) * ((shorts)four >> 8);
    return sum + ((ints)even << 16 >> 16) + ((ints)even >> 16) + ((ints)odd << 16 >> 16) + ((ints)odd >> 16);
}

#endif

INLINE int32_t add_up(ints lanes) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)lanes);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
#endif
}

/* ------------------------------------------------------------------ activations */

/* What is not finite makes the scale NaN, and by that the row's results. */
INLINE void quantize_group(const float *x, activations_t *to) {
    /* Without their signs, floats are in the order of their bits; infinity and then NaN are beyond all others. */
    int32_t largest_bits = 0;
    for (int i = 0; i < GROUP; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    float largest;
    memcpy(&largest, &largest_bits, 4);
    if (!(largest >= SMALLEST_ACTIVATION && largest < INFINITY)) {
        memset(to, 0, sizeof *to);
        to->scale = to->sum = largest < SMALLEST_ACTIVATION ? 0.0f : NAN;
        return;
    }
    const float inverse = 127.0f / largest;
    ints sums = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        const ints wide = to_nearest(*(const floats *)(x + i) * inverse);
        const chars codes = __builtin_convertvector(wide, chars);
        memcpy(to->codes + i, &codes, LANES);
        sums += wide;
    }
    to->scale = largest / 127.0f;
    to->sum = to->scale * (float)add_up(sums);
}

INLINE void quantize_row(const float *x, int64_t num_in, activations_t *to) {
    const int64_t whole = num_in / GROUP;
    for (int64_t group = 0; group < whole; group++) quantize_group(x + group * GROUP, to + group * ROW_BLOCK);
    if (whole * GROUP == num_in) return;
    float rest[GROUP] = {0};
    memcpy(rest, x + whole * GROUP, (num_in - whole * GROUP) * sizeof(float));
    quantize_group(rest, to + whole * ROW_BLOCK);
}

/* Of a block of rows: to [num_groups, ROW_BLOCK]. */
INLINE void quantize_rows(const float *x, int64_t x_stride, int64_t num_rows, int64_t num_in, activations_t *to) {
    for (int64_t row = 0; row < num_rows; row++) quantize_row(x + row * x_stride, num_in, to + row);
}

/* ------------------------------------------------------------------ the product */

INLINE int32_t four_codes(const activations_t *activations, int sub_block) {
    int32_t four;
    memcpy(&four, activations->codes + 4 * sub_block, 4);
    return four;
}

/* sums[rows] of the LANES columns of a tile that begin at `column`. x: [num_groups, ROW_BLOCK]. bits and rows are
 * constants at every call. */
INLINE void multiply_groups(const int bits, const int rows, const char *tile, int64_t column, const activations_t *x,
                            int64_t num_groups, floats *sums) {
    floats sum[ROW_BLOCK];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r] = (floats){0};
    for (int64_t group = 0; group < num_groups; group++, tile += GROUP_BYTES(bits), x += ROW_BLOCK) {
        const char *codes = tile + SCALE_BYTES + 4 * column;
        /* beyond the last tile it does nothing */
        for (int i = 0; i < GROUP_BYTES(bits); i += 64) __builtin_prefetch(tile + PREFETCH_BYTES + i);
        ints found[ROW_BLOCK];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) found[r] = (ints){0};
#pragma GCC unroll 8
        for (int sub_block = 0; sub_block < SUB_BLOCKS; sub_block += 8 / bits, codes += SUB_BLOCK_BYTES) {
            const words packed = *(const words *)codes;
            const words low = packed & (bits == 4 ? 0x0f0f0f0f : 0xffffffff), high = packed >> 4 & 0x0f0f0f0f;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                found[r] = dot(bits, found[r], low, four_codes(x + r, sub_block));
                if (bits == 4) found[r] = dot(bits, found[r], high, four_codes(x + r, sub_block + 1));
            }
        }
        const floats scale = to_floats(tile + 2 * column), minimum = to_floats(tile + 2 * TILE + 2 * column);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            sum[r] = multiply_add(__builtin_convertvector(found[r], floats), scale * x[r].scale, sum[r]);
            sum[r] = multiply_add(minimum, x[r].sum - (floats){0}, sum[r]); /* x - 0 is x: one instruction */
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sums[r] = sum[r];
}

INLINE void multiply_rows(const int rows, const matrix_t *matrix, const char *tile, int64_t column,
                          const activations_t *x, floats *sums) {
    if (matrix->bits == 4) multiply_groups(4, rows, tile, column, x, matrix->num_groups, sums);
    else multiply_groups(8, rows, tile, column, x, matrix->num_groups, sums);
}

INLINE void store_sums(const matrix_t *matrix, int64_t rows, int64_t first_column, floats *sums, float *out) {
    int64_t num_columns = matrix->num_out - first_column;
    if (num_columns > LANES) num_columns = LANES;
    for (int64_t r = 0; r < rows; r++) {
        float *to = out + r * matrix->num_out + first_column;
        if (matrix->bias) sums[r] += *(const floats *)(matrix->bias + first_column);
        if (num_columns == LANES) *(floats *)to = sums[r];
        else if (num_columns > 0) memcpy(to, &sums[r], num_columns * sizeof(float));
    }
}

/* One tile of columns for a block of rows, of which there are 1 to ROW_BLOCK. */
static void multiply_tile(const matrix_t *matrix, int64_t tile_index, int64_t rows, const activations_t *x,
                          float *out) {
    const char *tile = matrix->tiles + tile_index * matrix->num_groups * GROUP_BYTES(matrix->bits);
    for (int64_t column = 0; column < TILE; column += LANES) {
        floats sums[ROW_BLOCK];
#define ROWS(n) \
    case n: multiply_rows(n, matrix, tile, column, x, sums); break;
        switch (rows) {
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
            default: __builtin_unreachable();
        }
#undef ROWS
        store_sums(matrix, rows, tile_index * TILE + column, sums, out);
    }
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* By every thread of a team; all of it is done when one returns. x [num_rows, num_in], x_stride floats between rows; out
 * [num_rows, num_out], contiguous. scratch: activations_t [num_rows / ROW_BLOCK rounded up, num_groups, ROW_BLOCK]. */
INLINE void multiply_matrix(const matrix_t *matrix, const float *x, int64_t x_stride, int64_t num_rows, float *out,
                            activations_t *scratch) {
    const int64_t num_blocks = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK, block_size = matrix->num_groups * ROW_BLOCK;
    const int64_t num_chunks = (num_blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t first = block * ROW_BLOCK, rows = smaller(ROW_BLOCK, num_rows - first);
        quantize_rows(x + first * x_stride, x_stride, rows, matrix->num_in, scratch + block * block_size);
    }
    /* chunk-major: a tile stays in the first cache for a chunk's rows, the rows in the second for all tiles */
#pragma omp for schedule(static)
    for (int64_t work = 0; work < num_chunks * matrix->num_tiles; work++) {
        const int64_t first = work / matrix->num_tiles * CHUNK_BLOCKS, tile = work % matrix->num_tiles;
        for (int64_t block = first; block < smaller(first + CHUNK_BLOCKS, num_blocks); block++)
            multiply_tile(matrix, tile, smaller(ROW_BLOCK, num_rows - block * ROW_BLOCK), scratch + block * block_size,
                          out + block * ROW_BLOCK * matrix->num_out);
    }
}

#endif
