/* A function whose constant arguments are constants inside it, too. */

#ifndef PDSERVE_INLINE_H
#define PDSERVE_INLINE_H

#define INLINE static inline __attribute__((always_inline))

#endif
