/* Preloaded into a process, counts the bytes that are copied from memory to memory, in pieces of 1 KiB and more:
 * every memcpy and memmove of Python, its extensions and gRPC comes by here. The kernel's own copies do not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#define LEAST_BYTES 1024

typedef void *(*copy_fn)(void *, const void *, size_t);

static copy_fn real_memmove;
static atomic_ullong num_bytes;

unsigned long long copied_bytes(void) { return num_bytes; }

static void *copy(void *to, const void *from, size_t count) {
  if (real_memmove == NULL) real_memmove = (copy_fn)dlsym(RTLD_NEXT, "memmove");
  if (count >= LEAST_BYTES) num_bytes += count;
  return real_memmove(to, from, count);
}

void *memcpy(void *to, const void *from, size_t count) { return copy(to, from, count); }

void *memmove(void *to, const void *from, size_t count) { return copy(to, from, count); }
