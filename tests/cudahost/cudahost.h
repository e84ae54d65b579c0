/* A CUDA driver whose device memory is host memory and whose streams are threads: for tests without a GPU.
 *
 * Only what the tests need is here, with the signatures of the driver API. `host.c`: contexts, memory, checks.
 * `streams.c`: streams, events, copies. `kernel.c`: the kernel that is in the library's source, and its compiler.
 * `control.c`: what tests steer, and the table of functions. */
#ifndef CUDAHOST_H
#define CUDAHOST_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int Result;
typedef unsigned long long Pointer;

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
};

enum { MAX_DEVICES = 8, MAX_RULES = 16 };

typedef enum { DEVICE_MEMORY, PINNED_MEMORY, REGISTERED_MEMORY } Kind;

typedef struct Allocation {
  uintptr_t begin;
  size_t size;
  Kind kind;
  int device;
  unsigned flags;
  bool live;
  struct Allocation *next;
} Allocation;

typedef struct Stream Stream;

typedef struct Context {
  int device;
  int references;
  Result sticky;
  Stream *standard; /* what handle 0 means */
} Context;

typedef struct Event {
  Context *context;
  unsigned flags;
  long recorded, completed; /* how often it was recorded, and up to which record its streams have come */
  int references;           /* of the caller, and of the work that names it */
  bool destroyed;
} Event;

/* The one lock, and what every change of state is announced on. */
extern pthread_mutex_t lock;
extern pthread_cond_t changed;

extern Context contexts[MAX_DEVICES];
extern int device_count;

/* Counts a call of `function`; what a rule of the test makes it fail with, else SUCCESS. Takes the lock. */
Result enter(const char *function);
#define ENTER()                          \
  do {                                   \
    Result failure_ = enter(__func__);   \
    if (failure_) return failure_;       \
  } while (0)

Context *current(void);
/* Whether `[at, at + size)` may be touched now by work of a stream. Holds the lock; a false answer is noted. */
bool reachable(uintptr_t at, size_t size, const char *what);
/* Writes down what a correct program never does. Holds the lock. */
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* How long the stream dawdles before its next work, in microseconds. Holds the lock. */
unsigned dawdle_us(uint64_t *state);
uint64_t next_random(uint64_t *state);
uint64_t seed_of_stream(int number);
/* A rule for work that fails while it runs, not where it is given. Holds the lock. */
Result fails_while_running(const char *what);

/* Contexts are as new, and nothing of what they held is there any more. Holds the lock. */
void revive(void);

/* The memory in which a kernel of `device` may touch `[at, at + size)`, and where that is in this process; else NULL,
 * which is noted. Takes the lock. */
Allocation *kernel_reaches(uintptr_t at, size_t size, int device, uintptr_t *here);

typedef struct Launch Launch;
/* A kernel on the stream's thread; what its context fails with. */
Result run_launch(Launch *launch, Context *context, uint64_t *random);
/* Gives a launch to a stream, which frees it. */
Result give_launch(void *handle, Launch *launch);
int live_modules(void);

Stream *stream_of(void *handle);
void end_stream(Stream *stream);

#endif
