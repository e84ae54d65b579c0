/* What tests steer and ask, and the table through which cuda-python finds the functions. */
#define _GNU_SOURCE
#include "cudahost.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MAX_FUNCTIONS = 256, NAME = 64, LOG = 16384, NOT_THERE = 1 };

typedef struct {
  char name[NAME];
  long calls;
} Count;

typedef struct {
  char name[NAME];
  long left; /* calls until it strikes */
  Result code;
} Rule;

extern size_t device_bytes;
int live_allocations(Kind kind);
int live_streams(void);
int live_events(void);
int timed_events(void);

static Count counts[MAX_FUNCTIONS];
static int counted;
static Rule rules[MAX_RULES];
static char violations[LOG];
static char hidden[LOG];
static uint64_t seed;
static unsigned longest_us;

static long *count_of(const char *name) {
  for (int i = 0; i < counted; i++)
    if (!strcmp(counts[i].name, name)) return &counts[i].calls;
  if (counted == MAX_FUNCTIONS) return &counts[0].calls;
  snprintf(counts[counted].name, NAME, "%s", name);
  return &counts[counted++].calls;
}

static Result struck(const char *name) {
  for (int i = 0; i < MAX_RULES; i++)
    if (rules[i].left > 0 && !strcmp(rules[i].name, name) && --rules[i].left == 0) return rules[i].code;
  return SUCCESS;
}

Result enter(const char *function) {
  pthread_mutex_lock(&lock);
  ++*count_of(function);
  Result result = struck(function);
  if (result == ILLEGAL_ADDRESS && current()) {
    current()->sticky = result;
    pthread_cond_broadcast(&changed);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

Result fails_while_running(const char *what) { return struck(what); }

void violation(const char *format, ...) {
  size_t length = strlen(violations);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(violations + length, LOG - length, format, arguments);
  va_end(arguments);
  length = strlen(violations);
  if (length + 1 < LOG) strcpy(violations + length, "\n");
}

uint64_t next_random(uint64_t *state) {
  uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

uint64_t seed_of_stream(int number) { return seed * 1000003u + (uint64_t)number; }

/* Half of the time not at all, now and then much too long. */
unsigned dawdle_us(uint64_t *state) {
  if (!longest_us) return 0;
  uint64_t draw = next_random(state);
  if (draw % 16 < 8) return 0;
  unsigned us = (unsigned)((draw >> 8) % longest_us);
  return draw % 16 == 15 ? us * 8 : us;
}

/* Before anything else: `devices` of `bytes` of memory each. */
void cudahost_configure(int devices, size_t bytes) {
  device_count = devices;
  device_bytes = bytes;
}

/* From now on streams that are made dawdle, in an order that the seed chooses, `longest` microseconds at a time. */
void cudahost_timing(uint64_t chosen, unsigned longest) {
  pthread_mutex_lock(&lock);
  seed = chosen;
  longest_us = longest;
  pthread_mutex_unlock(&lock);
}

/* The `nth` call of `name` from now fails with `code`; "copy": one that was taken, while it runs. */
int cudahost_fail(const char *name, long nth, Result code) {
  pthread_mutex_lock(&lock);
  int at = 0;
  while (at < MAX_RULES && rules[at].left > 0) at++;
  if (at < MAX_RULES) {
    snprintf(rules[at].name, NAME, "%s", name);
    rules[at].left = nth;
    rules[at].code = code;
  }
  pthread_mutex_unlock(&lock);
  return at < MAX_RULES;
}

void cudahost_revive(void) {
  pthread_mutex_lock(&lock);
  revive();
  pthread_mutex_unlock(&lock);
}

/* Forget rules. */
void cudahost_forget(void) {
  pthread_mutex_lock(&lock);
  memset(rules, 0, sizeof rules);
  pthread_mutex_unlock(&lock);
}

/* Forget rules, counts and violations. */
void cudahost_reset(void) {
  pthread_mutex_lock(&lock);
  memset(rules, 0, sizeof rules);
  memset(counts, 0, sizeof counts);
  counted = 0;
  violations[0] = hidden[0] = 0;
  pthread_mutex_unlock(&lock);
}

long cudahost_calls(const char *name) {
  pthread_mutex_lock(&lock);
  long calls = *count_of(name);
  pthread_mutex_unlock(&lock);
  return calls;
}

/* A function that an older driver does not have: `cuGetProcAddress` no longer finds it. */
void cudahost_hide(const char *name) {
  pthread_mutex_lock(&lock);
  size_t length = strlen(hidden);
  snprintf(hidden + length, LOG - length, "[%s]", name);
  pthread_mutex_unlock(&lock);
}

void cudahost_violations(char *text, size_t length) {
  pthread_mutex_lock(&lock);
  snprintf(text, length, "%s", violations);
  pthread_mutex_unlock(&lock);
}

/* What is still there: 0 device memory, 1 pinned, 2 registered, 3 streams, 4 events, 5 contexts' references,
 * 6 modules, 7 events that were made with timing. */
int cudahost_live(int what) {
  pthread_mutex_lock(&lock);
  int found = 0;
  if (what <= 2) found = live_allocations((Kind)what);
  if (what == 3) found = live_streams();
  if (what == 4) found = live_events();
  for (int i = 0; what == 5 && i < device_count; i++) found += contexts[i].references;
  if (what == 6) found = live_modules();
  if (what == 7) found = timed_events();
  pthread_mutex_unlock(&lock);
  return found;
}

Result cuGetErrorName(Result code, const char **name) {
  static const struct {
    Result code;
    const char *name;
  } names[] = {
      {SUCCESS, "CUDA_SUCCESS"},
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (names[i].code == code) {
      *name = names[i].name;
      return SUCCESS;
    }
  *name = NULL;
  return INVALID_VALUE;
}

Result cuGetErrorString(Result code, const char **text) { return cuGetErrorName(code, text); }

static bool is_hidden(const char *name) {
  char bracketed[NAME + 2];
  snprintf(bracketed, sizeof bracketed, "[%s]", name);
  return strstr(hidden, bracketed) != NULL;
}

/* The newest function of this name that a program of this version is given. */
static void *find(const char *symbol, int version) {
  static void *self;
  char name[NAME];
  if (!self) {
    Dl_info info;
    dladdr((void *)find, &info);
    self = dlopen(info.dli_fname, RTLD_NOW);
  }
  bool batch = !strcmp(symbol, "cuMemcpyBatchAsync") || !strcmp(symbol, "cuMemcpy3DBatchAsync");
  for (const char **suffix = (const char *[]){"_v2", "", NULL}; *suffix; suffix++) {
    if (batch && (**suffix != 0) != (version >= 13000)) continue;
    snprintf(name, NAME, "%s%s", symbol, *suffix);
    void *found = is_hidden(name) ? NULL : dlsym(self, name);
    if (found) return found;
  }
  return NULL;
}

Result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
  (void)flags;
  *function = find(symbol, version);
  if (status) *status = *function ? 0 : NOT_THERE;
  return *function || status ? SUCCESS : NOT_FOUND;
}
