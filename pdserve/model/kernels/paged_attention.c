/* A layer's attention as a call of its own. */

#include "paged_attention.h"

void pdserve_paged_attention(const call_t *call) {
#pragma omp parallel num_threads((int)call->num_threads)
    attend(call);
}
