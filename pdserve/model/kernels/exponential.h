/* e^x for the model's kernels, without a branch, so that loops over it vectorise. Beyond the range that
 * is told the result is any number, or none: callers leave it out. */

#ifndef PDSERVE_EXPONENTIAL_H
#define PDSERVE_EXPONENTIAL_H

#include <stdint.h>
#include <string.h>

#include "inline.h"

/* For x from -87 to 88, to about 2e-7 relative. */
INLINE float exponential(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, held in the low bits */
    const float shifted = x * 1.44269504f + shift;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    const float n = shifted - shift;
    float r = x - n * 0.693359375f; /* ln 2 in two parts */
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const uint32_t power = (bits - 0x4B400000 + 127) << 23;
    float two_to_n;
    memcpy(&two_to_n, &power, 4);
    return p * two_to_n;
}

/* For x from -87 to 0, to 8e-5 relative: for what is then rounded to bfloat16, by up to 2e-3. */
INLINE float rough_exponential(float x) {
    const float shift = 12582912.0f;
    const float shifted = x * 1.44269504f + shift;
    const float f = x * 1.44269504f - (shifted - shift); /* x is (n + f) ln 2, f from -1/2 to 1/2 */
    float p = 0.0551716685f;
    p = p * f + 0.2426111251f;
    p = p * f + 0.69326097f;
    p = p * f + 0.99992806f;
    uint32_t n, power;
    memcpy(&n, &shifted, 4);
    memcpy(&power, &p, 4);
    power += n << 23;
    memcpy(&p, &power, 4);
    return p;
}

#endif
