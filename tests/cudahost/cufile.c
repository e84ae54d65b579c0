/* A cuFile whose device memory is the host's: the direct path of kvikio, on a machine that has none.
 *
 * Built as libcufile.so.0. Only what kvikio looks up is here, with the signatures of cufile.h. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { BASE_ERROR = 5000, VERSION = 1200, MAX_IO = 16384 };

typedef struct {
  int error, cuda;
} Error;

typedef struct {
  struct {
    unsigned major, minor;
    size_t poll_bytes, direct_kib;
    unsigned status, control;
  } nvfs;
  unsigned flags, cache_kib, buffer_kib, pinned_kib, batch, batch_ms;
} Properties;

typedef struct {
  int type;
  union {
    int fd;
    void *handle;
  } handle;
  const void *operations;
} Description;

typedef struct {
  void *handle;
  char *memory;
  size_t *size;
  off_t *offset, *memory_offset;
  ssize_t *done;
  bool writes;
} Request;

static const Error FINE;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static unsigned nvfs_major = 2;
static int refused;     /* registering a file fails with this */
static bool held;       /* requests do not end */
static int waiting;     /* requests that are held */
static long left;       /* requests until one fails */
static int failure;     /* with this: errno, or an error of cuFile's own above `BASE_ERROR` */
static size_t longest;  /* bytes that a request moves at most; 0: all */
static long made;       /* requests */

void cufile_configure(unsigned major, int refuse) {
  nvfs_major = major;
  refused = refuse;
}

void cufile_hold(int hold) {
  pthread_mutex_lock(&lock);
  held = hold;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

/* Returns when `count` requests are held. */
void cufile_wait_held(int count) {
  pthread_mutex_lock(&lock);
  while (waiting < count) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

void cufile_fail(long nth, int code) {
  pthread_mutex_lock(&lock);
  left = nth;
  failure = code;
  pthread_mutex_unlock(&lock);
}

void cufile_shorten(size_t bytes) { longest = bytes; }

long cufile_requests(void) { return made; }

static int enter(void) {
  pthread_mutex_lock(&lock);
  made++;
  waiting += held;
  pthread_cond_broadcast(&changed);
  bool was_held = held;
  while (held) pthread_cond_wait(&changed, &lock);
  waiting -= was_held;
  int code = left > 0 && --left == 0 ? failure : 0;
  pthread_mutex_unlock(&lock);
  return code;
}

static int touch(uintptr_t at, size_t size) {
  static int (*check)(uintptr_t, size_t);
  if (!check) check = (int (*)(uintptr_t, size_t))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cudahost_touch");
  return check(at, size);
}

/* As cuFile: -1 and errno, or minus an error of its own. */
static ssize_t move(void *handle, char *memory, size_t size, off_t offset, bool writes) {
  int code = enter();
  if (code > BASE_ERROR) return -code;
  if (code) {
    errno = code;
    return -1;
  }
  if (!touch((uintptr_t)memory, size)) return -(BASE_ERROR + 10);
  if (longest && size > longest) size = longest;
  int fd = (int)(intptr_t)handle;
  return writes ? pwrite(fd, memory, size, offset) : pread(fd, memory, size, offset);
}

/* The file once more, without O_DIRECT: host memory need not be aligned as device memory would. */
Error cuFileHandleRegister(void **handle, Description *description) {
  if (refused) return (Error){refused, 0};
  char name[64];
  snprintf(name, sizeof name, "/proc/self/fd/%d", description->handle.fd);
  *handle = (void *)(intptr_t)open(name, O_RDWR | O_CLOEXEC);
  return FINE;
}

void cuFileHandleDeregister(void *handle) { close((int)(intptr_t)handle); }

ssize_t cuFileRead(void *handle, void *memory, size_t size, off_t offset, off_t memory_offset) {
  return move(handle, (char *)memory + memory_offset, size, offset, false);
}

ssize_t cuFileWrite(void *handle, const void *memory, size_t size, off_t offset, off_t memory_offset) {
  return move(handle, (char *)memory + memory_offset, size, offset, true);
}

static void run(void *data) {
  Request *request = data;
  ssize_t done = move(request->handle, request->memory + *request->memory_offset, *request->size, *request->offset,
                      request->writes);
  *request->done = done == -1 ? -errno : done;
  free(request);
}

static Error give(Request request, void *stream) {
  static int (*launch)(void *, void (*)(void *), void *);
  if (!launch) launch = (int (*)(void *, void (*)(void *), void *))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchHostFunc");
  Request *kept = malloc(sizeof *kept);
  *kept = request;
  int status = launch(stream, run, kept);
  return status ? (Error){BASE_ERROR + 3, status} : FINE;
}

Error cuFileReadAsync(void *handle, void *memory, size_t *size, off_t *offset, off_t *memory_offset, ssize_t *done,
                      void *stream) {
  return give((Request){handle, memory, size, offset, memory_offset, done, false}, stream);
}

Error cuFileWriteAsync(void *handle, void *memory, size_t *size, off_t *offset, off_t *memory_offset, ssize_t *done,
                       void *stream) {
  return give((Request){handle, memory, size, offset, memory_offset, done, true}, stream);
}

Error cuFileDriverGetProperties(Properties *properties) {
  memset(properties, 0, sizeof *properties);
  properties->nvfs.major = nvfs_major;
  properties->nvfs.direct_kib = MAX_IO;
  return FINE;
}

Error cuFileGetVersion(int *version) {
  *version = VERSION;
  return FINE;
}

Error cuFileDriverOpen(void) { return FINE; }
Error cuFileDriverClose(void) { return FINE; }
Error cuFileDriverClose_v2(void) { return FINE; }
Error cuFileBufRegister(void) { return FINE; }
Error cuFileBufDeregister(void) { return FINE; }
Error cuFileDriverSetPollMode(void) { return FINE; }
Error cuFileDriverSetMaxCacheSize(void) { return FINE; }
Error cuFileDriverSetMaxPinnedMemSize(void) { return FINE; }
Error cuFileBatchIOSetUp(void) { return FINE; }
Error cuFileBatchIOSubmit(void) { return FINE; }
Error cuFileBatchIOGetStatus(void) { return FINE; }
Error cuFileBatchIOCancel(void) { return FINE; }
void cuFileBatchIODestroy(void) {}
Error cuFileStreamRegister(void) { return FINE; }
Error cuFileStreamDeregister(void) { return FINE; }
