/* What the machine can do at most, for `pdserve bench engine`: how fast a team of threads reads memory, and how fast it
 * multiplies what lies in its registers already.
 *
 * The threads begin together, each takes its own time, and the sum of their speeds counts: one that waits for a core that
 * another process has would else be the speed of all. Of some repetitions the fastest is the limit.
 */

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "clock.h"
#include "paged_attention.h"
#include "quantized_linear.h"

#define REPEATS 20
#define HUGE_PAGE (2 << 20)
/* Places that a thread reads at by turns: the CPU asks for more lines ahead than it would at one. */
#define STREAMS 4
/* Products under way at once, as many as two units with a latency of 5 need. Rows share their weights. */
#define BLOCKS 2
#define ROWS 6
#define NUM_STEPS 1000000

/* The compiler may assume nothing of the vector's value, nor leave out what made it. */
#if defined(__x86_64__)
#define OPAQUE(vector) __asm__ volatile("" : "+v"(vector))
#elif defined(__aarch64__)
#define OPAQUE(vector) __asm__ volatile("" : "+w"(vector))
#else
#define OPAQUE(vector) __asm__ volatile("" : "+m"(vector))
#endif

/* `work`, which is `amount` for each thread, by every thread of a team; adds up to speeds[REPEATS], a second. */
#define TIMED(speeds, amount, work)                               \
    for (int repeat = 0; repeat < REPEATS; repeat++) {            \
        _Pragma("omp barrier")                                    \
        const double begun = now();                               \
        work;                                                     \
        const double speed = (double)(amount) / (now() - begun);  \
        _Pragma("omp atomic")                                     \
        speeds[repeat] += speed;                                  \
    }

static double fastest(const double *speeds) {
    double found = 0.0;
    for (int repeat = 0; repeat < REPEATS; repeat++) found = speeds[repeat] > found ? speeds[repeat] : found;
    return found;
}

static void read_all(const char *from, int64_t num_bytes) {
    const int64_t stream = num_bytes / STREAMS;
    vec sums[STREAMS][2] = {{{0}}};
    for (int64_t i = 0; i < stream; i += 2 * VEC_BYTES)
        for (int s = 0; s < STREAMS; s++) {
            sums[s][0] += *(const vec *)(from + s * stream + i);
            sums[s][1] += *(const vec *)(from + s * stream + i + VEC_BYTES);
        }
    for (int s = 0; s < STREAMS; s++) {
        OPAQUE(sums[s][0]);
        OPAQUE(sums[s][1]);
    }
}

/* Bytes a second, of a buffer of num_bytes; 0 where there is no room for it. */
double pdserve_read_rate(int64_t num_bytes, int64_t num_threads) {
    const int64_t step = num_threads * STREAMS * HUGE_PAGE;
    const int64_t size = (num_bytes + step - 1) / step * step, share = size / num_threads;
    char *buffer = aligned_alloc(HUGE_PAGE, size);
    if (!buffer) return 0.0;
#if defined(MADV_HUGEPAGE)
    madvise(buffer, size, MADV_HUGEPAGE);
#endif
    double speeds[REPEATS] = {0};
#pragma omp parallel num_threads((int)num_threads)
    {
        char *own = buffer + omp_get_thread_num() * share;
        memset(own, 0, share); /* memory never written is not there yet */
        TIMED(speeds, share, read_all(own, share))
    }
    free(buffer);
    return fastest(speeds);
}

/* activations: of each row; they differ, so that no row's products are another's. bits is a constant at every call. */
INLINE void multiply_codes(const int bits, const int32_t *activations) {
    ints sums[BLOCKS][ROWS] = {{{0}}};
    words weights[BLOCKS] = {{0}};
    for (int64_t step = 0; step < NUM_STEPS; step++)
#pragma GCC unroll 2
        for (int block = 0; block < BLOCKS; block++) {
            OPAQUE(weights[block]);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) sums[block][r] = dot(bits, sums[block][r], weights[block], activations[r]);
        }
    for (int block = 0; block < BLOCKS; block++)
        for (int r = 0; r < ROWS; r++) OPAQUE(sums[block][r]);
}

/* Operations a second of dot() with weights of 4 or 8 bits, a product and its sum being two. */
double pdserve_dot_rate(int64_t bits, int64_t num_threads) {
    const int64_t operations = 2LL * 4 * LANES * BLOCKS * ROWS * NUM_STEPS;
    int32_t activations[ROWS];
    for (int r = 0; r < ROWS; r++) activations[r] = 0x01020304 * (r + 1);
    double speeds[REPEATS] = {0};
#pragma omp parallel num_threads((int)num_threads)
    {
        if (bits == 4) { TIMED(speeds, operations, multiply_codes(4, activations)) }
        else { TIMED(speeds, operations, multiply_codes(8, activations)) }
    }
    return fastest(speeds);
}

/* kind: FLOATS or PAIRS of halves. */
INLINE void multiply_numbers(const int kind) {
    vec sums[BLOCKS][ROWS] = {{{0}}}, right = {0};
    for (int64_t step = 0; step < NUM_STEPS; step++)
#pragma GCC unroll 2
        for (int block = 0; block < BLOCKS; block++)
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                OPAQUE(right); /* else one product would do for all sums */
                sums[block][r] = add_product(kind, 1.0f, right, sums[block][r]);
            }
    for (int block = 0; block < BLOCKS; block++)
        for (int r = 0; r < ROWS; r++) OPAQUE(sums[block][r]);
}

/* Operations a second with the widest vectors of floats, of 32 bits or of 16 where the attention multiplies those in
 * pairs; a product and its sum are two. */
double pdserve_float_rate(int64_t bits, int64_t num_threads) {
    const int64_t operations = 2LL * VEC * BLOCKS * ROWS * NUM_STEPS;
    double speeds[REPEATS] = {0};
#pragma omp parallel num_threads((int)num_threads)
    {
        if (HAS_PAIRS && bits == 16) { TIMED(speeds, 2 * operations, multiply_numbers(PAIRS)) }
        else { TIMED(speeds, operations, multiply_numbers(FLOATS)) }
    }
    return fastest(speeds);
}
