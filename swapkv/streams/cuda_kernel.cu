/* Copies a table of pieces: what swapkv launches for pages too small for the copy engines. Compiled by NVRTC when a
 * device is made, and by the C compiler of the tests: keep to what CUDA C and C have in common.
 *
 * A warp copies a piece: lanes side by side, so that the link sees whole cache lines. Nothing is written but the bytes
 * of the pieces, and no order holds among these. The caches are told that nobody reads the bytes again soon. */

typedef unsigned long long Word;

typedef struct {
  Word target, source, num_bytes;
} Piece;

enum { LANES = 32, VECTOR = sizeof(uint4), HELD = 8 };

/* `num_vectors` of 16 bytes between addresses that are multiples of 16. Each lane has HELD loads in flight: a pass of the
 * warp is 4 KiB, and one round trip over the link. */
static __device__ void copy_vectors(uint4 *target, const uint4 *source, Word num_vectors, unsigned lane) {
  Word at = lane;
  for (; at + (HELD - 1) * LANES < num_vectors; at += HELD * LANES) {
    uint4 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) held[i] = __ldcs(source + at + i * LANES);
#pragma unroll
    for (int i = 0; i < HELD; i++) __stcs(target + at + i * LANES, held[i]);
  }
  for (; at < num_vectors; at += LANES) __stcs(target + at, __ldcs(source + at));
}

static __device__ void copy_bytes(Word target, Word source, Word num_bytes, unsigned lane) {
  for (Word at = lane; at < num_bytes; at += LANES)
    __stcs((unsigned char *)(target + at), __ldcs((const unsigned char *)(source + at)));
}

/* Vectors need both addresses at the same distance from a multiple of 16; what is before the first and after the last
 * vector goes byte by byte. */
static __device__ void copy_piece(Word target, Word source, Word num_bytes, unsigned lane) {
  Word head = 0, body = 0;
  if ((target - source) % VECTOR == 0) {
    head = (VECTOR - target % VECTOR) % VECTOR;
    if (head > num_bytes) head = num_bytes;
    body = (num_bytes - head) / VECTOR * VECTOR;
  }
  copy_bytes(target, source, head, lane);
  copy_vectors((uint4 *)(target + head), (const uint4 *)(source + head), body / VECTOR, lane);
  copy_bytes(target + head + body, source + head + body, num_bytes - head - body, lane);
}

/* `table`: `[count]`, in pinned memory. Threads: a multiple of 32 in one dimension, and any number of blocks. */
#ifdef __cplusplus
extern "C"
#endif
__global__ void swapkv_copy_pieces(const Piece *table, Word count) {
  unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % LANES;
  for (Word at = thread / LANES; at < count; at += gridDim.x * blockDim.x / LANES) {
    const Piece *piece = table + at;
    copy_piece(__ldcs(&piece->target), __ldcs(&piece->source), __ldcs(&piece->num_bytes), lane);
  }
}
