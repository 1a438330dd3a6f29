/* Seconds since some moment, for what took how long. */

#ifndef PDSERVE_CLOCK_H
#define PDSERVE_CLOCK_H

#include <time.h>

#include "inline.h"

INLINE double seconds_of(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

INLINE double now(void) { return seconds_of(CLOCK_MONOTONIC); }

/* For which the calling thread has had a core. */
INLINE double seconds_on_core(void) { return seconds_of(CLOCK_THREAD_CPUTIME_ID); }

#endif
