/* The copy kernel of the library, run on the threads of streams; and a compiler that hands its source through.
 *
 * The source is the one that NVRTC gets on a GPU, seen as C through what stands here for CUDA's words: every load and
 * store passes the checks of the driver. Blocks and threads run one after the other, blocks in any order. */
#define _GNU_SOURCE
#include "cudahost.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_IMAGE = 200, NO_BINARY = 209, INVALID_OPTION = 5, THREADS_MAX = 1024, PARAMETERS = 2 };

#define ARCHITECTURE "sm_90"
#define HEAD "cubin " ARCHITECTURE "\n"

typedef struct { unsigned x, y, z; } Dimensions;
typedef struct { _Alignas(16) unsigned x; unsigned y, z, w; } uint4;

static __thread Dimensions blockIdx, threadIdx, blockDim, gridDim;
static __thread int device;
static __thread bool failed;
static __thread Allocation *seen; /* where the last access was */
static __thread uintptr_t shift;

static void *touch(const volatile void *address, size_t size) {
  uintptr_t at = (uintptr_t)address, here;
  if (failed) return NULL;
  if (at % size) {
    pthread_mutex_lock(&lock);
    violation("a kernel touches %zu bytes at %#zx, which is not aligned", size, (size_t)at);
    pthread_mutex_unlock(&lock);
    failed = true;
    return NULL;
  }
  here = at - shift;
  if (seen && seen->live && here >= seen->begin && here + size <= seen->begin + seen->size) return (void *)here;
  seen = kernel_reaches(at, size, device, &here);
  shift = at - here;
  failed = !seen;
  return seen ? (void *)here : NULL;
}

static long stored; /* bytes, by all kernels so far */

long cudahost_stored_bytes(void) { return __atomic_load_n(&stored, __ATOMIC_RELAXED); }

#define ACCESS(type, name)                                \
  static type load_##name(const type *address) {          \
    type *at = touch(address, sizeof(type));              \
    return at ? *at : (type){0};                          \
  }                                                       \
  static void store_##name(type *address, type value) {   \
    type *at = touch(address, sizeof(type));              \
    if (at) *at = value;                                  \
    __atomic_add_fetch(&stored, (long)sizeof(type), __ATOMIC_RELAXED); \
  }

ACCESS(uint4, vector)
ACCESS(unsigned char, byte)
typedef unsigned long long Long;
static Long load_long(const Long *address) {
  Long *at = touch(address, sizeof(Long));
  return at ? *at : 0;
}

#define __global__ static
#define __device__
#define __ldcs(address) _Generic(*(address), uint4: load_vector, unsigned char: load_byte, Long: load_long)(address)
#define __stcs(address, value) _Generic(*(address), uint4: store_vector, unsigned char: store_byte)(address, value)

#include KERNEL_SOURCE

__asm__(".section .rodata\nkernel_source: .incbin \"" KERNEL_SOURCE "\"\n.byte 0\n.previous\n");
extern const char kernel_source[] __attribute__((visibility("hidden")));

typedef struct {
  Context *context;
  bool live;
} Module;

struct Launch {
  Module *module;
  Dimensions grid, block;
  unsigned long long parameters[PARAMETERS];
};

static int modules_live;

int live_modules(void) { return modules_live; }

/* A cubin of the compiler below, or of the real one if that was found first. */
Result cuModuleLoadData(Module **module, const char *image) {
  ENTER();
  if (!current()) return INVALID_CONTEXT;
  if (current()->sticky) return current()->sticky;
  bool real = !memcmp(image, "\177ELF", 4), ours = !strncmp(image, HEAD, strlen(HEAD));
  if (!real && !ours) return strncmp(image, "cubin ", 6) ? INVALID_IMAGE : NO_BINARY;
  if (ours && strcmp(image + strlen(HEAD), kernel_source)) {
    pthread_mutex_lock(&lock);
    violation("a module is loaded that was not compiled from %s", KERNEL_SOURCE);
    pthread_mutex_unlock(&lock);
    return INVALID_IMAGE;
  }
  *module = malloc(sizeof **module);
  **module = (Module){current(), true};
  pthread_mutex_lock(&lock);
  modules_live++;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

Result cuModuleGetFunction(Module **function, Module *module, const char *name) {
  ENTER();
  *function = module;
  return strcmp(name, "swapkv_copy_pieces") ? NOT_FOUND : SUCCESS;
}

/* Stays known, so that a kernel that comes too late is found out. */
Result cuModuleUnload(Module *module) {
  ENTER();
  pthread_mutex_lock(&lock);
  if (!module->live) violation("a module is unloaded twice");
  modules_live -= module->live;
  module->live = false;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

Result cuLaunchKernel(Module *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                      void **extra) {
  ENTER();
  if (!grid_x || grid_y != 1 || grid_z != 1 || !block_x || block_x > THREADS_MAX || block_y != 1 || block_z != 1)
    return INVALID_VALUE;
  if (shared || extra || !parameters) return INVALID_VALUE;
  Launch *launch = malloc(sizeof *launch);
  *launch = (Launch){function, {grid_x, 1, 1}, {block_x, 1, 1}, {0}};
  for (int i = 0; i < PARAMETERS; i++) memcpy(&launch->parameters[i], parameters[i], sizeof *launch->parameters);
  return give_launch(stream, launch);
}

static void run_block(const Launch *launch, unsigned block) {
  blockIdx = (Dimensions){block, 0, 0};
  for (unsigned thread = 0; thread < launch->block.x && !failed; thread++) {
    threadIdx = (Dimensions){thread, 0, 0};
    swapkv_copy_pieces((const Piece *)(uintptr_t)launch->parameters[0], launch->parameters[1]);
  }
}

Result run_launch(Launch *launch, Context *context, uint64_t *random) {
  pthread_mutex_lock(&lock);
  Result failure = fails_while_running("kernel");
  if (!launch->module->live || launch->module->context != context) {
    violation("a kernel runs whose module is %s", launch->module->live ? "of another device" : "unloaded");
    failure = ILLEGAL_ADDRESS;
  }
  pthread_mutex_unlock(&lock);
  if (failure) return failure;
  device = context->device;
  gridDim = launch->grid;
  blockDim = launch->block;
  failed = false;
  seen = NULL;
  shift = 0;
  unsigned first = (unsigned)(next_random(random) % launch->grid.x);
  for (unsigned i = 0; i < launch->grid.x && !failed; i++) {
    run_block(launch, (first + i) % launch->grid.x);
    if (dawdle_us(random) > 0) sched_yield();
  }
  return failed ? ILLEGAL_ADDRESS : SUCCESS;
}

typedef struct {
  char *source;
  const char *log;
} Program;

Result nvrtcCreateProgram(Program **program, const char *source, const char *name, int count, const char *const *headers,
                          const char *const *names) {
  ENTER();
  (void)name, (void)count, (void)headers, (void)names;
  *program = malloc(sizeof **program);
  **program = (Program){strdup(source), ""};
  return SUCCESS;
}

Result nvrtcDestroyProgram(Program **program) {
  ENTER();
  free((*program)->source);
  free(*program);
  *program = NULL;
  return SUCCESS;
}

Result nvrtcCompileProgram(Program *program, int count, const char *const *options) {
  program->log = "nothing\nto add";
  ENTER();
  for (int i = 0; i < count; i++)
    if (!strcmp(options[i], "--gpu-architecture=" ARCHITECTURE)) return SUCCESS;
  program->log = "invalid value for --gpu-architecture";
  return INVALID_OPTION;
}

Result nvrtcGetProgramLogSize(Program *program, size_t *size) {
  *size = strlen(program->log) + 1;
  return SUCCESS;
}

Result nvrtcGetProgramLog(Program *program, char *log) {
  strcpy(log, program->log);
  return SUCCESS;
}

Result nvrtcGetCUBINSize(Program *program, size_t *size) {
  ENTER();
  *size = strlen(HEAD) + strlen(program->source) + 1;
  return SUCCESS;
}

Result nvrtcGetCUBIN(Program *program, char *cubin) {
  ENTER();
  sprintf(cubin, "%s%s", HEAD, program->source);
  return SUCCESS;
}

const char *nvrtcGetErrorString(Result code) { return code ? "an error" : "success"; }
