/* Contexts, memory and the checks of addresses. */
#define _GNU_SOURCE
#include "cudahost.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { POISON = 0xDB, PAGE = 4096, STACK = 64, HOST_DEVICEMAP = 2 };

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
Context contexts[MAX_DEVICES];
int device_count = 2;
size_t device_bytes = (size_t)1 << 30;

static bool initialized, lacks_unified;
static Allocation *allocations;
static size_t used[MAX_DEVICES];
static __thread Context *stack[STACK];
static __thread int depth;

Context *current(void) { return depth ? stack[depth - 1] : NULL; }

/* The context of a call that needs one, and what is wrong with it. */
static Result usable(Context *context) { return context == NULL ? INVALID_CONTEXT : context->sticky; }

int live_allocations(Kind kind) {
  int count = 0;
  for (Allocation *a = allocations; a; a = a->next) count += a->live && a->kind == kind;
  return count;
}

static Allocation *containing(uintptr_t at, size_t size) {
  for (Allocation *a = allocations; a; a = a->next)
    if (a->live && at >= a->begin && at + size <= a->begin + a->size) return a;
  return NULL;
}

static const char *complaint(uintptr_t at, size_t size) {
  for (Allocation *a = allocations; a; a = a->next)
    if (a->live && at < a->begin + a->size && at + size > a->begin) return "out of bounds";
  for (Allocation *a = allocations; a; a = a->next)
    if (at < a->begin + a->size && at + size > a->begin)
      return a->kind == REGISTERED_MEMORY ? "host memory that is not registered any more" : "freed memory";
  return "host memory that is not pinned";
}

bool reachable(uintptr_t at, size_t size, const char *what) {
  if (containing(at, size)) return true;
  violation("%s touches %s: %zu bytes at %#zx", what, complaint(at, size), size, (size_t)at);
  return false;
}

/* With a bias, devices see pinned memory at other addresses than the host does. */
static uintptr_t bias;

void cudahost_bias(uintptr_t chosen) { bias = chosen; }

Allocation *kernel_reaches(uintptr_t at, size_t size, int device, uintptr_t *here) {
  pthread_mutex_lock(&lock);
  *here = bias && at >= bias ? at - bias : at;
  Allocation *a = reachable(*here, size, "a kernel") ? containing(*here, size) : NULL;
  const char *wrong = NULL;
  if (a && a->kind == DEVICE_MEMORY && a->device != device) wrong = "memory of another device";
  if (a && a->kind != DEVICE_MEMORY && !(a->flags & HOST_DEVICEMAP)) wrong = "host memory that is not mapped";
  if (a && (a->kind == DEVICE_MEMORY) != (*here == at) && bias) wrong = "an address that the device does not see";
  if (wrong) violation("a kernel touches %s: %zu bytes at %#zx", wrong, size, (size_t)at);
  pthread_mutex_unlock(&lock);
  return wrong ? NULL : a;
}

static Allocation *add(uintptr_t begin, size_t size, Kind kind, int device, unsigned flags) {
  Allocation *a = calloc(1, sizeof *a);
  *a = (Allocation){begin, size, kind, device, flags, true, allocations};
  allocations = a;
  return a;
}

static void *map(size_t size) {
  size_t whole = (size + PAGE - 1) / PAGE * PAGE;
  void *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return NULL;
  memset(memory, POISON, whole);
  return memory;
}

Result cuInit(unsigned flags) {
  ENTER();
  initialized = true;
  return flags ? INVALID_VALUE : SUCCESS;
}

Result cuDriverGetVersion(int *version) {
  *version = 13000;
  return SUCCESS;
}

Result cuDeviceGetCount(int *count) {
  ENTER();
  *count = device_count;
  return initialized ? SUCCESS : NOT_INITIALIZED;
}

Result cuDeviceGet(int *device, int ordinal) {
  ENTER();
  if (!initialized) return NOT_INITIALIZED;
  *device = ordinal;
  return ordinal >= 0 && ordinal < device_count ? SUCCESS : INVALID_DEVICE;
}

Result cuDeviceGetName(char *name, int length, int device) {
  ENTER();
  snprintf(name, length, "host memory %d", device);
  return SUCCESS;
}

Result cuDeviceTotalMem_v2(size_t *bytes, int device) {
  (void)device;
  *bytes = device_bytes;
  return SUCCESS;
}

Result cuDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, length, "0000:%02x:00.0", device + 1);
  return SUCCESS;
}

void cudahost_lack_unified(int lacks) { lacks_unified = lacks; }

Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  ENTER();
  if (device < 0 || device >= device_count) return INVALID_DEVICE;
  switch (attribute) {
    case 75: *value = 9; break;             /* compute capability 9.0 */
    case 41: *value = !lacks_unified; break;
    case 91: *value = !bias; break;         /* host pointers serve as the device's */
    case 92: case 122: *value = 1; break;   /* stream memory operations */
    case 16: *value = 4; break;             /* multiprocessors */
    default: *value = 0;
  }
  return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(void **context, int device) {
  ENTER();
  if (device < 0 || device >= device_count) return INVALID_DEVICE;
  pthread_mutex_lock(&lock);
  contexts[device].device = device;
  contexts[device].references++;
  *context = &contexts[device];
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

/* What a context still holds goes with it; only one that was lost may hold anything. */
static void drop_memory(int device) {
  for (Allocation *a = allocations; a; a = a->next) {
    if (!a->live || a->device != device) continue;
    if (!contexts[device].sticky) violation("device %d is let go with %zu bytes of memory in use", device, a->size);
    a->live = false;
    if (a->kind == DEVICE_MEMORY) used[device] -= a->size;
  }
}

void revive(void) {
  for (Allocation *a = allocations; a; a = a->next) a->live = false;
  for (int device = 0; device < MAX_DEVICES; device++) {
    contexts[device].sticky = SUCCESS;
    contexts[device].references = 0;
    used[device] = 0;
  }
}

Result cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER();
  pthread_mutex_lock(&lock);
  Context *context = &contexts[device];
  Result result = context->references ? SUCCESS : INVALID_CONTEXT;
  if (!result && --context->references == 0) {
    drop_memory(device);
    context->sticky = SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

Result cuCtxGetCurrent(void **context) {
  *context = current();
  return SUCCESS;
}

Result cuCtxSetCurrent(void *context) {
  ENTER();
  depth = depth ? depth - 1 : 0;
  if (context) stack[depth++] = context;
  return SUCCESS;
}

Result cuCtxPushCurrent_v2(void *context) {
  if (context == NULL || depth == STACK) return INVALID_CONTEXT;
  stack[depth++] = context;
  return SUCCESS;
}

Result cuCtxPopCurrent_v2(void **context) {
  if (!depth) return INVALID_CONTEXT;
  void *popped = stack[--depth];
  if (context) *context = popped;
  return SUCCESS;
}

Result cuCtxGetDevice(int *device) {
  if (!current()) return INVALID_CONTEXT;
  *device = current()->device;
  return SUCCESS;
}

Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return usable(current());
}

Result cuMemAlloc_v2(Pointer *address, size_t size) {
  ENTER();
  Context *context = current();
  Result result = usable(context);
  if (result) return result;
  pthread_mutex_lock(&lock);
  void *memory = size && used[context->device] + size <= device_bytes ? map(size) : NULL;
  if (memory) {
    used[context->device] += size;
    add((uintptr_t)memory, size, DEVICE_MEMORY, context->device, 0);
    *address = (uintptr_t)memory;
  }
  pthread_mutex_unlock(&lock);
  return memory ? SUCCESS : size ? OUT_OF_MEMORY : INVALID_VALUE;
}

Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  ENTER();
  if (!current()) return INVALID_CONTEXT;
  *total = device_bytes;
  *free_bytes = device_bytes - used[current()->device];
  return SUCCESS;
}

/* Freed memory stays mapped, poisoned, and known: who touches it is found out. */
static Result drop(uintptr_t begin, Kind kind) {
  for (Allocation *a = allocations; a; a = a->next) {
    if (!a->live || a->begin != begin || a->kind != kind) continue;
    a->live = false;
    if (kind != REGISTERED_MEMORY) memset((void *)a->begin, POISON, a->size);
    if (kind == DEVICE_MEMORY) used[a->device] -= a->size;
    return SUCCESS;
  }
  violation("%#zx is given back, which is no memory of this kind", (size_t)begin);
  return kind == REGISTERED_MEMORY ? NOT_REGISTERED : INVALID_VALUE;
}

static Result drop_locked(uintptr_t begin, Kind kind) {
  pthread_mutex_lock(&lock);
  Result result = drop(begin, kind);
  pthread_mutex_unlock(&lock);
  return result;
}

Result cuMemFree_v2(Pointer address) {
  ENTER();
  Result result = usable(current());
  return result ? result : drop_locked(address, DEVICE_MEMORY);
}

Result cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
  ENTER();
  Result result = usable(current());
  if (result) return result;
  pthread_mutex_lock(&lock);
  *pointer = map(size);
  if (*pointer) add((uintptr_t)*pointer, size, PINNED_MEMORY, current()->device, flags);
  pthread_mutex_unlock(&lock);
  return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

Result cuMemFreeHost(void *pointer) {
  ENTER();
  return drop_locked((uintptr_t)pointer, PINNED_MEMORY);
}

Result cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags) {
  ENTER();
  Result result = usable(current());
  if (result) return result;
  pthread_mutex_lock(&lock);
  uintptr_t at = (uintptr_t)pointer;
  for (Allocation *a = allocations; a; a = a->next)
    if (a->live && at < a->begin + a->size && at + size > a->begin) result = ALREADY_REGISTERED;
  if (!result) add(at, size, REGISTERED_MEMORY, current()->device, flags);
  pthread_mutex_unlock(&lock);
  return result;
}

Result cuMemHostUnregister(void *pointer) {
  ENTER();
  return drop_locked((uintptr_t)pointer, REGISTERED_MEMORY);
}

Result cuMemHostGetDevicePointer_v2(Pointer *address, void *pointer, unsigned flags) {
  ENTER();
  pthread_mutex_lock(&lock);
  Allocation *a = containing((uintptr_t)pointer, 1);
  bool mapped = a && a->kind != DEVICE_MEMORY && (a->flags & HOST_DEVICEMAP) && !flags;
  pthread_mutex_unlock(&lock);
  *address = (uintptr_t)pointer + bias;
  return mapped ? SUCCESS : INVALID_VALUE;
}

Result cuMemsetD8_v2(Pointer address, unsigned char value, size_t size) {
  ENTER();
  pthread_mutex_lock(&lock);
  bool fine = reachable(address, size, "a memset");
  pthread_mutex_unlock(&lock);
  if (!fine) return INVALID_VALUE;
  memset((void *)(uintptr_t)address, value, size);
  return SUCCESS;
}

Result cuPointerGetAttribute(void *data, int attribute, Pointer pointer) {
  ENTER();
  pthread_mutex_lock(&lock);
  Allocation *a = containing(pointer, 1);
  Allocation found = a ? *a : (Allocation){0};
  pthread_mutex_unlock(&lock);
  if (!a) return INVALID_VALUE;
  switch (attribute) {
    case 1: *(void **)data = &contexts[found.device]; break;
    case 2: *(unsigned *)data = found.kind == DEVICE_MEMORY ? 2 : 1; break;
    case 3: *(Pointer *)data = pointer; break;
    case 4: *(Pointer *)data = pointer; return found.kind == DEVICE_MEMORY ? INVALID_VALUE : SUCCESS;
    case 8: *(unsigned *)data = 0; break;
    case 9: *(int *)data = found.device; break;
    case 11: *(Pointer *)data = found.begin; break;
    case 12: *(size_t *)data = found.size; break;
    default: return INVALID_VALUE;
  }
  return SUCCESS;
}

Result cuPointerGetAttributes(unsigned count, int *attributes, void **data, Pointer pointer) {
  for (unsigned i = 0; i < count; i++)
    if (cuPointerGetAttribute(data[i], attributes[i], pointer)) memset(data[i], 0, sizeof(int));
  return SUCCESS;
}
