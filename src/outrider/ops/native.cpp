// The matrix product that the host program lends, and the number of threads.

#include "native.h"

Sgemm sgemm_ = nullptr;

EXPORT void set_sgemm(void* function) { sgemm_ = reinterpret_cast<Sgemm>(function); }

// Accumulators that a kernel needs: one for each thread.
EXPORT int64_t num_threads() { return omp_get_max_threads(); }
