/* CUDA's runtime and driver for a machine without a GPU: it computes nothing, and keeps account of which thread asks what of
 * which device. torch itself runs on top of it, unchanged. "Device" memory is the host's, so copies copy; kernels do nothing.
 * As CUDA 12 and later do, cudaSetDevice makes a primary context. What is said to be stuck is never ready.
 *
 * Account: one line a call in the file ACCOUNT names: the thread's id, what it did, the device.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 1, NOT_READY = 600, DEVICES = 4, STREAMS = 256 };

static __thread int current;
static int contexts[DEVICES], stuck[DEVICES];

typedef struct { int device; } *stream_t;

static void note(const char *what, int device)
{
    static int fd = -1;
    char line[120];
    if (fd < 0) fd = open(getenv("ACCOUNT"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    int length = snprintf(line, sizeof line, "%ld %s %d\n", syscall(SYS_gettid), what, device);
    if (write(fd, line, length) != length) abort();
}

static int use(int device) /* what any work on a device does first */
{
    if (!contexts[device]) note("context", device);
    contexts[device] = 1;
    return SUCCESS;
}

static int device_of(stream_t stream) { return (uintptr_t)stream < 16 ? current : stream->device; }
static int is_default(stream_t stream) { return (uintptr_t)stream < 16; }

/* for tests */
void account_stick(int device, int is_stuck) { stuck[device] = is_stuck; }
int account_has_context(int device) { return contexts[device]; }

/* devices */
int cudaGetDeviceCount(int *count)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"); /* how many, and not which */
    *count = DEVICES;
    if (visible)
        for (*count = *visible != 0; *visible; visible++) *count += *visible == ',';
    return SUCCESS;
}
int cudaGetDevice(int *device) { *device = current; return SUCCESS; }
int cudaSetDevice(int device) { note("set", current = device); return use(device); }
int cudaDriverGetVersion(int *version) { *version = 13020; return SUCCESS; }
int cudaRuntimeGetVersion(int *version) { *version = 13020; return SUCCESS; }
int cudaGetLastError(void) { return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }
int cudaDeviceSynchronize(void) { note("synchronize", current); return use(current); }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return SUCCESS; }
int cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = 1UL << 36; return use(current); }
int cudaGetDeviceProperties(char *properties, int device)
{
    memset(properties, 0, 600); /* the same in CUDA 12 and 13: name, memory, warp, capability */
    strcpy(properties, "accounting device");
    *(size_t *)(properties + 288) = 1UL << 36;
    *(int *)(properties + 308) = 32;
    *(int *)(properties + 360) = 9;
    return SUCCESS;
}
int cudaGetDeviceProperties_v2(char *properties, int device) { return cudaGetDeviceProperties(properties, device); }

/* streams and events */
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
int cudaStreamCreateWithPriority(stream_t *stream, unsigned flags, int priority)
{
    *stream = malloc(sizeof **stream);
    (*stream)->device = current;
    return use(current);
}
int cudaStreamDestroy(stream_t stream) { return SUCCESS; }
int cudaStreamIsCapturing(stream_t stream, int *status) { *status = 0; return SUCCESS; }
int cudaStreamGetCaptureInfo(stream_t stream, int *status, ...) { *status = 0; return SUCCESS; }
int cudaStreamQuery(stream_t stream)
{
    int device = device_of(stream);
    note("query", device);
    use(device);
    return stuck[device] && is_default(stream) ? NOT_READY : SUCCESS;
}
int cudaStreamSynchronize(stream_t stream)
{
    int device = device_of(stream);
    note(is_default(stream) ? "wait-for-default" : "wait", device);
    use(device);
    while (stuck[device] && is_default(stream)) usleep(1000);
    return SUCCESS;
}
int cudaStreamWaitEvent(stream_t stream, void *event, unsigned flags) { return SUCCESS; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = malloc(1); return use(current); }
int cudaEventRecord(void *event, stream_t stream) { return SUCCESS; }
int cudaEventRecordWithFlags(void *event, stream_t stream, unsigned flags) { return SUCCESS; }
int cudaEventQuery(void *event) { return SUCCESS; }
int cudaEventSynchronize(void *event) { return SUCCESS; }
int cudaEventDestroy(void *event) { return SUCCESS; }

/* memory */
int cudaMalloc(void **address, size_t size) { *address = calloc(1, size); return use(current); }
int cudaFree(void *address) { note("free", current); free(address); return SUCCESS; }
static struct { char *start; size_t size; } pinned[4096];
static int pins;
int cudaHostAlloc(void **address, size_t size, unsigned flags)
{
    if (posix_memalign(address, 4096, size)) return INVALID;
    int number = __atomic_fetch_add(&pins, 1, __ATOMIC_SEQ_CST);
    if (number >= 4096) abort();
    pinned[number].start = *address;
    pinned[number].size = size;
    note("pin", current);
    return use(current);
}
int cudaFreeHost(void *address) { free(address); return SUCCESS; }
int cudaHostRegister(void *address, size_t size, unsigned flags) { note("register", current); return use(current); }
int cudaHostUnregister(void *address) { return SUCCESS; }
int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return SUCCESS; }
int cudaPointerGetAttributes(int *attributes, const char *address)
{
    memset(attributes, 0, 24); /* the first field is the kind of memory: 0 is ordinary, 1 page-locked */
    for (int number = 0; number < pins && number < 4096; number++)
        if (address >= pinned[number].start && address < pinned[number].start + pinned[number].size) attributes[0] = 1;
    return SUCCESS;
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { memcpy(to, from, size); return use(current); }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, stream_t stream)
{
    memcpy(to, from, size);
    return use(current);
}
int cudaMemsetAsync(void *to, int value, size_t size, stream_t stream) { memset(to, value, size); return use(current); }

/* kernels */
int cudaLaunchKernel(void *kernel, ...) { return use(current); }
int cudaLaunchKernelExC(void *kernel, ...) { return use(current); }
int cudaFuncGetAttributes(void *attributes, void *kernel) { return SUCCESS; }

/* the driver: what torch's libraries ask for by name */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = contexts[device]; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "accounted"; return SUCCESS; }
#define REFUSED(name) int name(void) { return INVALID; }
REFUSED(cuInit) REFUSED(cuCtxGetCurrent) REFUSED(cuCtxSetCurrent) REFUSED(cuDeviceGet) REFUSED(cuDeviceGetAttribute)
REFUSED(cuDevicePrimaryCtxRetain) REFUSED(cuFuncGetAttribute) REFUSED(cuFuncSetAttribute) REFUSED(cuFuncSetCacheConfig)
REFUSED(cuLaunchCooperativeKernel) REFUSED(cuLaunchKernel) REFUSED(cuLinkAddData_v2) REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2) REFUSED(cuModuleGetFunction) REFUSED(cuModuleLoad) REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx) REFUSED(cuModuleUnload) REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuPointerGetAttribute) REFUSED(cuTensorMapEncodeTiled) REFUSED(cuLaunchKernelEx) REFUSED(cuModuleGetGlobal_v2)
