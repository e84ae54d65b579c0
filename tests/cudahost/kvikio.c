/* What kvikio looks up besides, when it is loaded: it calls none of it for what the tests do. */
#include "cudahost.h"

Result cuPointerGetAttribute(void *data, int attribute, Pointer pointer);

enum { NOT_SUPPORTED = 801 };

Result cuCtxCreate_v4(void **context, void *parameters, unsigned flags, int device) {
  (void)context, (void)parameters, (void)flags, (void)device;
  return NOT_SUPPORTED;
}

Result cuCtxDestroy_v2(void *context) {
  (void)context;
  return NOT_SUPPORTED;
}

Result cuMemGetAddressRange_v2(Pointer *begin, size_t *size, Pointer pointer) {
  enum { BEGIN = 11, SIZE = 12 };
  Result result = begin ? cuPointerGetAttribute(begin, BEGIN, pointer) : SUCCESS;
  return result || !size ? result : cuPointerGetAttribute(size, SIZE, pointer);
}

/* Whether a request of `cufile.c` may touch device memory now; a false answer is a violation. */
int cudahost_touch(uintptr_t at, size_t size) {
  pthread_mutex_lock(&lock);
  bool fine = reachable(at, size, "a cuFile request");
  pthread_mutex_unlock(&lock);
  return fine;
}
