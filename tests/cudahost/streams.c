/* Streams: threads that do what they are given in order. Events, copies, and waits among them. */
#define _GNU_SOURCE
#include "cudahost.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { DISABLE_TIMING = 2, WAIT_POLL_US = 30 };

typedef enum { COPIES, FILL, RECORD, WAIT_EVENT, CALL, WAIT_VALUE, WRITE_VALUE, KERNEL, END } Work;

typedef struct {
  uintptr_t target, source;
  size_t size;
} Piece;

typedef struct Entry {
  Work work;
  Piece *pieces;
  size_t count;
  Event *event;
  long number; /* which record of the event */
  void (*function)(void *);
  void *data;
  volatile uint32_t *word;
  uint32_t value;
  unsigned flags;
  Launch *launch;
  struct Entry *next;
} Entry;

struct Stream {
  Context *context;
  int priority, number;
  unsigned flags;
  pthread_t thread;
  Entry *first, *last;
  long given, done;
  uint64_t random;
};

static int streams_made, streams_live, events_live, events_timed;

int live_streams(void) { return streams_live; }
int live_events(void) { return events_live; }
int timed_events(void) { return events_timed; }

static void release_event(Event *event) {
  if (--event->references == 0) free(event);
}

static bool satisfied(const Entry *entry) {
  uint32_t found = *entry->word;
  switch (entry->flags & 3) {
    case 0: return (int32_t)(found - entry->value) >= 0;
    case 1: return found == entry->value;
    default: return (found & entry->value) != 0;
  }
}

/* Pieces of a batch have no order, and one piece may come in two halves. */
static void run_pieces(Stream *stream, Entry *entry) {
  for (size_t left = entry->count; left; left--) {
    size_t at = entry->count > 1 ? next_random(&stream->random) % left : 0;
    Piece piece = entry->pieces[at];
    entry->pieces[at] = entry->pieces[left - 1];
    size_t half = piece.size / 2;
    memcpy((void *)piece.target, (void *)piece.source, half);
    if (dawdle_us(&stream->random) > 0) sched_yield();
    memcpy((void *)(piece.target + half), (void *)(piece.source + half), piece.size - half);
  }
}

/* Memory that was freed between submission and run is found here. Holds the lock. */
static Result check_pieces(Entry *entry) {
  Result failure = fails_while_running("copy");
  for (size_t i = 0; i < entry->count; i++) {
    Piece *piece = &entry->pieces[i];
    if (!reachable(piece->target, piece->size, "a copy under way") ||
        !reachable(piece->source, piece->size, "a copy under way"))
      failure = ILLEGAL_ADDRESS;
  }
  return failure;
}

static void run_copies(Stream *stream, Entry *entry) {
  pthread_mutex_lock(&lock);
  Result failure = check_pieces(entry);
  if (failure) stream->context->sticky = failure;
  pthread_mutex_unlock(&lock);
  if (!failure) run_pieces(stream, entry);
}

static void run_kernel(Stream *stream, Entry *entry) {
  Result failure = run_launch(entry->launch, stream->context, &stream->random);
  pthread_mutex_lock(&lock);
  if (failure) stream->context->sticky = failure;
  pthread_mutex_unlock(&lock);
}

static void wait_for_event(Stream *stream, Entry *entry) {
  pthread_mutex_lock(&lock);
  while (entry->event->completed < entry->number && !stream->context->sticky) pthread_cond_wait(&changed, &lock);
  release_event(entry->event);
  pthread_mutex_unlock(&lock);
}

static void run(Stream *stream, Entry *entry) {
  switch (entry->work) {
    case COPIES: run_copies(stream, entry); break;
    case KERNEL: run_kernel(stream, entry); break;
    case FILL: memset((void *)entry->pieces->target, (int)entry->value, entry->pieces->size); break;
    case CALL: entry->function(entry->data); break;
    case WRITE_VALUE: *entry->word = entry->value; break;
    case WAIT_EVENT: wait_for_event(stream, entry); break;
    case WAIT_VALUE:
      while (!satisfied(entry) && !stream->context->sticky) usleep(WAIT_POLL_US);
      break;
    default: break;
  }
}

/* After a failure that sticks nothing runs any more, but events are let go: whoever waits is told. */
static void finish(Stream *stream, Entry *entry) {
  if (entry->work == RECORD) {
    if (entry->event->completed < entry->number) entry->event->completed = entry->number;
    release_event(entry->event);
  }
  stream->done++;
  pthread_cond_broadcast(&changed);
}

static Entry *next_entry(Stream *stream, unsigned *dawdle) {
  pthread_mutex_lock(&lock);
  while (!stream->first) pthread_cond_wait(&changed, &lock);
  Entry *entry = stream->first;
  stream->first = entry->next;
  if (!stream->first) stream->last = NULL;
  *dawdle = stream->context->sticky ? 0 : dawdle_us(&stream->random);
  pthread_mutex_unlock(&lock);
  return entry;
}

static void *work(void *argument) {
  Stream *stream = argument;
  for (bool ended = false; !ended;) {
    unsigned dawdle;
    Entry *entry = next_entry(stream, &dawdle);
    if (dawdle) usleep(dawdle);
    ended = entry->work == END;
    if (!stream->context->sticky || entry->work == WAIT_EVENT) run(stream, entry);
    pthread_mutex_lock(&lock);
    finish(stream, entry);
    pthread_mutex_unlock(&lock);
    free(entry->pieces);
    free(entry->launch);
    free(entry);
  }
  free(stream);
  return NULL;
}

/* Holds the lock. */
static void give(Stream *stream, Entry entry) {
  Entry *kept = malloc(sizeof *kept);
  *kept = entry;
  kept->next = NULL;
  if (stream->last) stream->last->next = kept;
  else stream->first = kept;
  stream->last = kept;
  stream->given++;
  pthread_cond_broadcast(&changed);
}

static Result give_locked(Stream *stream, Entry entry) {
  pthread_mutex_lock(&lock);
  Result sticky = stream->context->sticky;
  if (!sticky) give(stream, entry);
  pthread_mutex_unlock(&lock);
  return sticky;
}

Result give_launch(void *handle, Launch *launch) {
  Stream *stream = stream_of(handle);
  Result result = stream ? give_locked(stream, (Entry){.work = KERNEL, .launch = launch}) : INVALID_CONTEXT;
  if (result) free(launch);
  return result;
}

static Stream *start(Context *context, unsigned flags, int priority) {
  Stream *stream = calloc(1, sizeof *stream);
  pthread_mutex_lock(&lock);
  stream->context = context;
  stream->flags = flags;
  stream->priority = priority;
  stream->number = streams_made++;
  stream->random = seed_of_stream(stream->number);
  pthread_mutex_unlock(&lock);
  pthread_create(&stream->thread, NULL, work, stream);
  pthread_detach(stream->thread);
  return stream;
}

Stream *stream_of(void *handle) {
  if ((uintptr_t)handle > 2) return handle;
  Context *context = current();
  if (context && !context->standard) context->standard = start(context, 0, 0);
  return context ? context->standard : NULL;
}

Result cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
  ENTER();
  if (!current()) return INVALID_CONTEXT;
  if (current()->sticky) return current()->sticky;
  *stream = start(current(), flags, priority);
  pthread_mutex_lock(&lock);
  streams_live++;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

Result cuStreamCreate(Stream **stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

/* As the real one: returns at once, and the stream ends when its work is over. */
Result cuStreamDestroy_v2(Stream *stream) {
  ENTER();
  pthread_mutex_lock(&lock);
  streams_live--;
  give(stream, (Entry){.work = END});
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

Result cuStreamGetCtx(void *handle, void **context) {
  Stream *stream = stream_of(handle);
  if (!stream) return INVALID_CONTEXT;
  *context = stream->context;
  return SUCCESS;
}

Result cuStreamGetPriority(void *handle, int *priority) {
  *priority = stream_of(handle)->priority;
  return SUCCESS;
}

Result cuStreamGetFlags(void *handle, unsigned *flags) {
  *flags = stream_of(handle)->flags;
  return SUCCESS;
}

Result cuStreamQuery(void *handle) {
  Stream *stream = stream_of(handle);
  pthread_mutex_lock(&lock);
  Result result = stream->context->sticky ? stream->context->sticky : stream->done < stream->given ? NOT_READY : SUCCESS;
  pthread_mutex_unlock(&lock);
  return result;
}

Result cuStreamSynchronize(void *handle) {
  ENTER();
  Stream *stream = stream_of(handle);
  pthread_mutex_lock(&lock);
  long given = stream->given;
  while (stream->done < given && !stream->context->sticky) pthread_cond_wait(&changed, &lock);
  Result result = stream->context->sticky;
  pthread_mutex_unlock(&lock);
  return result;
}

Result cuEventCreate(Event **event, unsigned flags) {
  ENTER();
  if (!current()) return INVALID_CONTEXT;
  if (current()->sticky) return current()->sticky;
  *event = calloc(1, sizeof **event);
  (*event)->context = current();
  (*event)->flags = flags;
  (*event)->references = 1;
  pthread_mutex_lock(&lock);
  events_live++;
  events_timed += !(flags & DISABLE_TIMING);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

Result cuEventDestroy_v2(Event *event) {
  ENTER();
  pthread_mutex_lock(&lock);
  events_live--;
  event->destroyed = true;
  release_event(event);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

Result cuEventRecord(Event *event, void *handle) {
  ENTER();
  Stream *stream = stream_of(handle);
  if (!stream) return INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  Result result = stream->context->sticky;
  if (!result && event->context != stream->context) {
    violation("an event of device %d is recorded on a stream of device %d", event->context->device,
              stream->context->device);
    result = INVALID_HANDLE;
  }
  if (!result) {
    event->references++;
    event->recorded++;
    give(stream, (Entry){.work = RECORD, .event = event, .number = event->recorded});
  }
  pthread_mutex_unlock(&lock);
  return result;
}

Result cuEventRecordWithFlags(Event *event, void *handle, unsigned flags) {
  return flags ? INVALID_VALUE : cuEventRecord(event, handle);
}

Result cuEventQuery(Event *event) {
  ENTER();
  pthread_mutex_lock(&lock);
  Result result = event->context->sticky;
  if (!result && event->completed < event->recorded) result = NOT_READY;
  pthread_mutex_unlock(&lock);
  return result;
}

Result cuEventSynchronize(Event *event) {
  ENTER();
  pthread_mutex_lock(&lock);
  long recorded = event->recorded;
  event->references++;
  while (event->completed < recorded && !event->context->sticky) pthread_cond_wait(&changed, &lock);
  Result result = event->context->sticky;
  release_event(event);
  pthread_mutex_unlock(&lock);
  return result;
}

/* An event that was never recorded is waited for by nobody, as with the real driver: the trap that tests must find. */
Result cuStreamWaitEvent(void *handle, Event *event, unsigned flags) {
  ENTER();
  Stream *stream = stream_of(handle);
  if (!stream || flags) return stream ? INVALID_VALUE : INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  Result result = stream->context->sticky;
  if (!result && !event->recorded) violation("a stream waits for an event that was never recorded");
  if (!result && event->completed < event->recorded) {
    event->references++;
    give(stream, (Entry){.work = WAIT_EVENT, .event = event, .number = event->recorded});
  }
  pthread_mutex_unlock(&lock);
  return result;
}

Result cuLaunchHostFunc(void *handle, void (*function)(void *), void *data) {
  ENTER();
  Stream *stream = stream_of(handle);
  return stream ? give_locked(stream, (Entry){.work = CALL, .function = function, .data = data}) : INVALID_CONTEXT;
}

static Result on_word(void *handle, Work work, Pointer address, uint32_t value, unsigned flags) {
  Stream *stream = stream_of(handle);
  if (!stream) return INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  bool fine = reachable(address, sizeof(uint32_t), "a stream's memory operation");
  pthread_mutex_unlock(&lock);
  volatile uint32_t *word = (volatile uint32_t *)(uintptr_t)address;
  Entry entry = {.work = work, .word = word, .value = value, .flags = flags};
  return fine ? give_locked(stream, entry) : INVALID_VALUE;
}

Result cuStreamWaitValue32_v2(void *handle, Pointer address, uint32_t value, unsigned flags) {
  ENTER();
  return on_word(handle, WAIT_VALUE, address, value, flags);
}

Result cuStreamWriteValue32_v2(void *handle, Pointer address, uint32_t value, unsigned flags) {
  ENTER();
  return on_word(handle, WRITE_VALUE, address, value, flags);
}

/* Checks every piece, then gives all of them or none. */
static Result copies(void *handle, Piece *pieces, size_t count) {
  Stream *stream = stream_of(handle);
  Result result = stream ? SUCCESS : INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count && !result; i++)
    if (!pieces[i].size || !reachable(pieces[i].target, pieces[i].size, "an asynchronous copy") ||
        !reachable(pieces[i].source, pieces[i].size, "an asynchronous copy"))
      result = INVALID_VALUE;
  if (!result) result = stream->context->sticky;
  if (!result) give(stream, (Entry){.work = COPIES, .pieces = pieces, .count = count});
  pthread_mutex_unlock(&lock);
  if (result) free(pieces);
  return result;
}

Result cuMemcpyAsync(Pointer target, Pointer source, size_t size, void *handle) {
  ENTER();
  Piece *piece = malloc(sizeof *piece);
  *piece = (Piece){target, source, size};
  return copies(handle, piece, 1);
}

Result cuMemcpyHtoDAsync_v2(Pointer target, const void *source, size_t size, void *handle) {
  return cuMemcpyAsync(target, (uintptr_t)source, size, handle);
}

Result cuMemcpyDtoHAsync_v2(void *target, Pointer source, size_t size, void *handle) {
  return cuMemcpyAsync((uintptr_t)target, source, size, handle);
}

Result cuMemcpyDtoDAsync_v2(Pointer target, Pointer source, size_t size, void *handle) {
  return cuMemcpyAsync(target, source, size, handle);
}

typedef struct {
  int order;
  int hints[4];
  unsigned flags;
} Attributes;

Result cuMemcpyBatchAsync_v2(Pointer *targets, Pointer *sources, size_t *sizes, size_t count, Attributes *attributes,
                             size_t *from, size_t kinds, void *handle) {
  ENTER();
  bool ordered = kinds >= 1 && kinds <= count && from[0] == 0;
  for (size_t k = 0; k < kinds && ordered; k++)
    ordered = attributes[k].order >= 1 && attributes[k].order <= 3 && (!k || from[k] > from[k - 1]) && from[k] < count;
  if (!count || !ordered || (uintptr_t)handle <= 1) return INVALID_VALUE;
  Piece *pieces = malloc(count * sizeof *pieces);
  for (size_t i = 0; i < count; i++) pieces[i] = (Piece){targets[i], sources[i], sizes[i]};
  return copies(handle, pieces, count);
}

/* As CUDA 12.8 had it. */
Result cuMemcpyBatchAsync(Pointer *targets, Pointer *sources, size_t *sizes, size_t count, Attributes *attributes,
                          size_t *from, size_t kinds, size_t *failed, void *handle) {
  Result result = cuMemcpyBatchAsync_v2(targets, sources, sizes, count, attributes, from, kinds, handle);
  if (result && failed) *failed = SIZE_MAX;
  return result;
}

typedef struct {
  int kind;
  Pointer at;
  size_t row_length, layer_height;
  int hint[2];
} Operand;

typedef struct {
  Operand source, target;
  size_t width, height, depth;
  int order;
  unsigned flags;
} Grid;

static bool well_formed(const Grid *grid) {
  size_t width = grid->width;
  return width && grid->height && grid->depth == 1 && grid->order >= 1 && grid->order <= 3 && grid->source.kind == 1 &&
         grid->target.kind == 1 && grid->source.row_length >= width && grid->target.row_length >= width;
}

Result cuMemcpy3DBatchAsync_v2(size_t count, Grid *grids, unsigned long long flags, void *handle) {
  ENTER();
  size_t rows = 0;
  for (size_t i = 0; i < count; i++)
    if (well_formed(&grids[i])) rows += grids[i].height;
    else return INVALID_VALUE;
  if (!count || flags || (uintptr_t)handle <= 1) return INVALID_VALUE;
  Piece *pieces = malloc(rows * sizeof *pieces), *piece = pieces;
  for (size_t i = 0; i < count; i++)
    for (size_t row = 0; row < grids[i].height; row++)
      *piece++ = (Piece){grids[i].target.at + row * grids[i].target.row_length,
                         grids[i].source.at + row * grids[i].source.row_length, grids[i].width};
  return copies(handle, pieces, rows);
}

/* As CUDA 12.8 had it. */
Result cuMemcpy3DBatchAsync(size_t count, Grid *grids, size_t *failed, unsigned long long flags, void *handle) {
  Result result = cuMemcpy3DBatchAsync_v2(count, grids, flags, handle);
  if (result && failed) *failed = SIZE_MAX;
  return result;
}

Result cuMemsetD8Async(Pointer address, unsigned char value, size_t size, void *handle) {
  ENTER();
  Stream *stream = stream_of(handle);
  if (!stream) return INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  bool fine = reachable(address, size, "a memset");
  pthread_mutex_unlock(&lock);
  if (!fine) return INVALID_VALUE;
  Piece *piece = malloc(sizeof *piece);
  *piece = (Piece){address, 0, size};
  return give_locked(stream, (Entry){.work = FILL, .pieces = piece, .count = 1, .value = value});
}
