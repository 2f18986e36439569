// A GPU that computes nothing: what PyTorch's CUDA build asks of the CUDA runtime, the driver, NVML, cuBLAS and NCCL.
//
// The library is preloaded before NVIDIA's. Memory is reserved address space up to the size of the device, streams and
// events are numbers, kernels and collectives are counted and return. So PyTorch's host side runs as it is: the caching
// allocator, streams, ProcessGroupNCCL, the choice of kernels and their checks of arguments, inductor, Triton.
//
// Values: device memory reads as zero. A copy to the host writes zeros, a copy to the device moves nothing. There are
// two exceptions. `all()` is true, so that checks for finite values pass. And what the host has just copied to the
// device comes back, if no kernel was launched since: the host's own numbers, after an all-reduce.
//
// build.py adds a function that returns 0 for every other symbol that PyTorch's libraries need. See docs/plan.md.

#define _GNU_SOURCE
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#undef cublasCreate
#undef cudaGetDeviceProperties

enum { MAX_DEVICES = 16, DRIVER_VERSION = 13000 };

static const size_t CONTEXT_BYTES = 512ull << 20;  // what a context takes of a device before any tensor
static const size_t LARGEST_ZEROED = 1ull << 20;   // larger copies leave the host's memory as it is

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t device_bytes(void) {
    const char *text = getenv("NULL_GPU_BYTES");
    return text ? strtoull(text, NULL, 10) : 85017624576ull;  // an H100 with 80 GB
}

static int device_count(void) {
    const char *text = getenv("NULL_GPU_DEVICES");
    return text ? atoi(text) : 1;
}

static const char *device_name(void) {
    const char *text = getenv("NULL_GPU_NAME");
    return text ? text : "NVIDIA H100 80GB HBM3";
}

// A new handle of a stream, a library or a module. It points to nothing.
static void *new_handle(void) {
    static atomic_ulong last = 0x5000;
    return (void *)(atomic_fetch_add(&last, 16) + 16);
}

// ---------------------------------------------------------------------------------------------------------------------
// Record: how often what happened between null_gpu_start and null_gpu_stop, by name
// ---------------------------------------------------------------------------------------------------------------------

typedef struct {
    char *what;    // kernel, wait, collective, copy, allocate, ...
    char *detail;  // name of the kernel, of the function that waits, ...
    unsigned long long count, bytes;
} Entry;

enum { MAX_ENTRIES = 8192 };

static Entry entries[MAX_ENTRIES];
static size_t entry_count;
static atomic_int is_recording;
static void (*on_wait)(const char *function);

static size_t hash(const char *what, const char *detail) {
    size_t value = 5381;
    for (; *what; what++) value = 33 * value + (unsigned char)*what;
    for (; *detail; detail++) value = 33 * value + (unsigned char)*detail;
    return value % MAX_ENTRIES;
}

static void record(const char *what, const char *detail, size_t bytes) {
    if (!is_recording) return;
    pthread_mutex_lock(&lock);
    Entry *entry = &entries[hash(what, detail)];
    while (entry->what && (strcmp(entry->what, what) || strcmp(entry->detail, detail)))
        entry = entry + 1 < entries + MAX_ENTRIES ? entry + 1 : entries;
    if (!entry->what) {
        if (++entry_count == MAX_ENTRIES) abort();  // the table has to be larger
        entry->what = strdup(what), entry->detail = strdup(detail);
    }
    entry->count++, entry->bytes += bytes;
    pthread_mutex_unlock(&lock);
}

static void record_wait(const char *function) {
    record("wait", function, 0);
    if (is_recording && on_wait) on_wait(function);
}

// Forget what was recorded, and record from here on. `callback` is called at each wait of the host, or is NULL.
void null_gpu_start(void (*callback)(const char *)) {
    pthread_mutex_lock(&lock);
    for (Entry *entry = entries; entry < entries + MAX_ENTRIES; entry++) free(entry->what), free(entry->detail);
    memset(entries, 0, sizeof entries);
    entry_count = 0, on_wait = callback, is_recording = 1;
    pthread_mutex_unlock(&lock);
}

// Stop, and write a line "what <tab> detail <tab> count <tab> bytes" for each entry to a file.
int null_gpu_stop(const char *path) {
    is_recording = 0;
    FILE *file = fopen(path, "w");
    if (!file) return 1;
    for (Entry *entry = entries; entry < entries + MAX_ENTRIES; entry++)
        if (entry->what) fprintf(file, "%s\t%s\t%llu\t%llu\n", entry->what, entry->detail, entry->count, entry->bytes);
    return fclose(file);
}

// With NULL_GPU_RECORD=PATH a process records from its start to its end, into PATH.PID.
__attribute__((constructor)) static void start_with_process(void) {
    if (getenv("NULL_GPU_RECORD")) null_gpu_start(NULL);
}

__attribute__((destructor)) static void stop_with_process(void) {
    char path[4096];
    if (!getenv("NULL_GPU_RECORD")) return;
    snprintf(path, sizeof path, "%s.%d", getenv("NULL_GPU_RECORD"), getpid());
    null_gpu_stop(path);
}

// os._exit ends a process without its destructors.
__attribute__((noreturn)) void _exit(int status) {
    stop_with_process();
    for (;;) syscall(SYS_exit_group, status);
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory: blocks of reserved address space
// ---------------------------------------------------------------------------------------------------------------------

typedef enum { ON_DEVICE, PINNED } Place;

typedef struct {
    char *start;
    size_t bytes;
    Place place;
    int device;
} Block;

static Block *blocks;
static size_t block_count, block_capacity;
static size_t used[MAX_DEVICES];
static __thread int current_device;
static __thread cudaError_t last_error;
static __thread int asked_all;  // the last kernel of this thread was `all()`

// The last small copy to the device, until a kernel is launched.
static __thread struct {
    const void *to;
    size_t bytes;
    char values[256];
} last_sent;

static void *reserve(size_t bytes) {
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static void add_block(void *start, size_t bytes, Place place) {
    pthread_mutex_lock(&lock);
    if (block_count == block_capacity) {
        block_capacity = block_capacity ? 2 * block_capacity : 1024;
        blocks = realloc(blocks, block_capacity * sizeof(Block));
    }
    blocks[block_count++] = (Block){start, bytes, place, current_device};
    pthread_mutex_unlock(&lock);
}

// The block that holds an address, or one of 0 bytes.
static Block find_block(const void *address) {
    Block found = {0};
    pthread_mutex_lock(&lock);
    for (Block *block = blocks; block < blocks + block_count; block++)
        if ((char *)address >= block->start && (char *)address < block->start + block->bytes) found = *block;
    pthread_mutex_unlock(&lock);
    return found;
}

static Block remove_block(const void *start) {
    Block found = {0};
    pthread_mutex_lock(&lock);
    for (Block *block = blocks; block < blocks + block_count; block++)
        if (block->start == start) {
            found = *block, *block = blocks[--block_count];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

// Take bytes of a device. Returns 0 if it has no more.
static int take(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    int fits = used[device] + bytes + CONTEXT_BYTES <= device_bytes();
    if (fits) used[device] += bytes;
    pthread_mutex_unlock(&lock);
    record(fits ? "allocate" : "out of memory", "device", bytes);
    return fits;
}

static void give_back(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    used[device] -= bytes;
    pthread_mutex_unlock(&lock);
    record("free", "device", bytes);
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
    if (!take(current_device, bytes)) return last_error = cudaErrorMemoryAllocation;
    if (!(*address = reserve(bytes))) return last_error = cudaErrorMemoryAllocation;
    add_block(*address, bytes, ON_DEVICE);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) { return cudaMalloc(address, bytes); }

cudaError_t cudaFree(void *address) {
    Block block = remove_block(address);
    if (!block.bytes) return cudaSuccess;
    munmap(block.start, block.bytes);
    give_back(block.device, block.bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = device_bytes();
    *free_bytes = device_bytes() - CONTEXT_BYTES - used[current_device];
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    if (!(*address = reserve(bytes))) return last_error = cudaErrorMemoryAllocation;
    add_block(*address, bytes, PINNED);
    record("allocate", "pinned", bytes);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }

cudaError_t cudaFreeHost(void *address) {
    Block block = remove_block(address);
    if (block.bytes) munmap(block.start, block.bytes);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    add_block(address, bytes, PINNED);
    record("register", "pinned", bytes);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
    remove_block(address);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    Block block = find_block(address);
    memset(attributes, 0, sizeof *attributes);
    if (!block.bytes) {
        attributes->type = cudaMemoryTypeUnregistered;
        return cudaSuccess;
    }
    attributes->type = block.place == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = block.device;
    attributes->devicePointer = (void *)address;
    attributes->hostPointer = block.place == PINNED ? (void *)address : NULL;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA runtime: devices
// ---------------------------------------------------------------------------------------------------------------------

// As with the driver, a process that was forked after the first call has no device.
static cudaError_t use_driver(void) {
    static pid_t user;
    if (!user) user = getpid();
    return user == getpid() ? cudaSuccess : cudaErrorInitializationError;
}

CUresult cuInit(unsigned flags) { return (CUresult)use_driver(); }

cudaError_t cudaGetDeviceCount(int *count) {
    *count = use_driver() ? 0 : device_count();
    return use_driver();
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (use_driver()) return last_error = use_driver();
    if (device < 0 || device >= device_count()) return last_error = cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    *properties = (struct cudaDeviceProp){
        .totalGlobalMem = device_bytes(),
        .major = 9,
        .minor = 0,
        .multiProcessorCount = 132,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .sharedMemPerBlock = 49152,
        .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472,
        .l2CacheSize = 52428800,
        .memoryBusWidth = 5120,
        .textureAlignment = 512,
        .memPitch = 2147483647,
        .concurrentKernels = 1,
        .unifiedAddressing = 1,
    };
    snprintf(properties->name, sizeof properties->name, "%s", device_name());
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch ((int)attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
        case cudaDevAttrWarpSize: *value = properties.warpSize; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = properties.sharedMemPerMultiprocessor; break;
        case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        default: *value = 1;  // "yes" to whether something is supported
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 1;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error) { return "nullGpuError"; }

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the null GPU";
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

// ---------------------------------------------------------------------------------------------------------------------
// CUDA runtime: copies
// ---------------------------------------------------------------------------------------------------------------------

static void send_to_device(const void *to, const void *from, size_t bytes) {
    last_sent.bytes = bytes <= sizeof last_sent.values ? bytes : 0;
    last_sent.to = to;
    memcpy(last_sent.values, from, last_sent.bytes);
}

static void read_from_device(void *to, const void *from, size_t bytes) {
    if (bytes == last_sent.bytes && from == last_sent.to)
        memcpy(to, last_sent.values, bytes);
    else if (bytes <= LARGEST_ZEROED)
        memset(to, bytes == 1 && asked_all, bytes);
}

static int is_to_host(const void *to, enum cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDefault) return find_block(to).place == PINNED || !find_block(to).bytes;
    return kind == cudaMemcpyDeviceToHost;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    static const char *const NAMES[] = {"host to host", "to device", "to host", "on device", "to anywhere"};
    int is_pageable = (kind == cudaMemcpyHostToDevice && !find_block(from).bytes) ||
                      (kind == cudaMemcpyDeviceToHost && !find_block(to).bytes);
    record(is_pageable ? "pageable copy" : "copy", NAMES[kind], bytes);
    if (is_pageable && kind == cudaMemcpyDeviceToHost) record_wait("cudaMemcpyAsync to pageable memory");
    if (kind == cudaMemcpyHostToHost)
        memcpy(to, from, bytes);
    else if (is_to_host(to, kind))
        read_from_device(to, from, bytes);
    else if (kind == cudaMemcpyHostToDevice)
        send_to_device(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    record_wait("cudaMemcpy");
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t bytes, cudaStream_t stream) {
    record("copy", "between devices", bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    record("memset", "", bytes);
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA runtime: streams and events. Work is done when it is queued.
// ---------------------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = new_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    if (status) *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    record_wait("cudaStreamSynchronize");
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    record_wait("cudaDeviceSynchronize");
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    record_wait("cudaEventSynchronize");
    return cudaSuccess;
}

// An event is the time at which it was recorded, in milliseconds.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(double));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(double *)event = 1e3 * now.tv_sec + 1e-6 * now.tv_nsec;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = *(double *)end - *(double *)start;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA runtime: kernels. nvcc's code registers each with its name, and launches it by the address of its stub.
// ---------------------------------------------------------------------------------------------------------------------

typedef struct {
    const void *stub;
    const char *name;
} Kernel;

static Kernel *kernels;
static size_t kernel_count, kernel_capacity, sorted_count;

static int compare_kernels(const void *a, const void *b) {
    const Kernel *left = a, *right = b;
    return left->stub < right->stub ? -1 : left->stub > right->stub;
}

static const char *kernel_name(const void *stub) {
    pthread_mutex_lock(&lock);
    if (sorted_count != kernel_count) {
        qsort(kernels, kernel_count, sizeof(Kernel), compare_kernels);
        sorted_count = kernel_count;
    }
    Kernel key = {stub, NULL}, *found = bsearch(&key, kernels, kernel_count, sizeof(Kernel), compare_kernels);
    pthread_mutex_unlock(&lock);
    return found ? found->name : "a kernel without a name";
}

// Also called by the functions that build.py generates for matmuls.
void null_gpu_launch(const char *name) {
    asked_all = strstr(name, "and_kernel_cuda") != NULL;
    last_sent.bytes = 0;
    record("kernel", name, 0);
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}

void __cudaRegisterFunction(void **handle, const char *stub, char *device_stub, const char *name, int thread_limit,
                            void *thread, void *block, void *block_dim, void *grid_dim, int *warp_size) {
    pthread_mutex_lock(&lock);
    if (kernel_count == kernel_capacity) {
        kernel_capacity = kernel_capacity ? 2 * kernel_capacity : 65536;
        kernels = realloc(kernels, kernel_capacity * sizeof(Kernel));
    }
    kernels[kernel_count++] = (Kernel){stub, name};
    pthread_mutex_unlock(&lock);
}

typedef struct {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} Configuration;

static __thread Configuration configurations[8];
static __thread unsigned configuration_count;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    configurations[configuration_count++ % 8] = (Configuration){grid, block, shared_bytes, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    Configuration top = configurations[--configuration_count % 8];
    *grid = top.grid, *block = top.block, *shared_bytes = top.shared_bytes, *(void **)stream = top.stream;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
    null_gpu_launch(kernel_name(stub));
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *stub, void **arguments) {
    null_gpu_launch(kernel_name(stub));
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
    *kernel = (cudaKernel_t)stub;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                               cudaStream_t stream) {
    null_gpu_launch(kernel_name((const void *)kernel));
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *stub) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 64, .binaryVersion = 90, .ptxVersion = 90};
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks_, const void *stub, int threads,
                                                                   size_t shared_bytes, unsigned flags) {
    *blocks_ = 2;
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char zeros[65536];
    *address = zeros;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Driver
// ---------------------------------------------------------------------------------------------------------------------

static int do_nothing(void) { return 0; }

// The newest version of a driver function.
static void *driver_function(const char *name) {
    char versioned[128];
    for (int version = 4; version > 1; version--) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, version);
        void *found = dlsym(RTLD_DEFAULT, versioned);
        if (found) return found;
    }
    void *found = dlsym(RTLD_DEFAULT, name);
    return found ? found : (void *)do_nothing;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *function = driver_function(name);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result) {
    *function = driver_function(name);
    if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "an error of the null GPU";
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *text, int size, CUdevice device) {
    snprintf(text, size, "%s", device_name());
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    *bytes = device_bytes();
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    if (flags) *flags = 0;
    *is_active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 1 << 20;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    *(CUdeviceptr *)value = address;  // Triton asks for the device's own pointer
    return CUDA_SUCCESS;
}

// Expandable segments: address space is reserved first, and handles of physical memory are mapped into it.

typedef struct {
    int device;
    size_t bytes;
} Physical;

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
    void *start = reserve(bytes);
    if (!start) return CUDA_ERROR_OUT_OF_MEMORY;
    add_block(start, bytes, ON_DEVICE);
    *address = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    remove_block((void *)address);
    munmap((void *)address, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    int device = properties->location.id;
    if (!take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    Physical *physical = malloc(sizeof *physical);
    *physical = (Physical){device, bytes};
    *handle = (CUmemGenericAllocationHandle)physical;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Physical *physical = (Physical *)handle;
    give_back(physical->device, physical->bytes);
    free(physical);
    return CUDA_SUCCESS;
}

// Modules and launches, of inductor and Triton. A function is its name.

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = new_handle();
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, NULL); }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 64; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *configuration) {
    *clusters = 1;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int threads, size_t bytes) {
    *count = 2;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **arguments,
                        void **extra) {
    null_gpu_launch((const char *)function);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *configuration, CUfunction function, void **arguments, void **extra) {
    null_gpu_launch((const char *)function);
    return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                   CUstream stream, void **arguments) {
    null_gpu_launch((const char *)function);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// NVML. The allocator asks it about fabric handles, and whether a device is there. Its header is in no package.
// ---------------------------------------------------------------------------------------------------------------------

enum { NVML_NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return 0; }

int nvmlInitWithFlags(unsigned flags) { return 0; }

int nvmlShutdown(void) { return 0; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = DRIVER_VERSION;
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = device_count();
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    *handle = (void *)1;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)1;
    return 0;
}

int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; }  // the caller has set it to "not supported"

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NVML_NOT_SUPPORTED; }

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    *count = 0;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// cuBLAS and cuDNN: handles, and what a caller reads. build.py generates the matmuls.
// ---------------------------------------------------------------------------------------------------------------------

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = new_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = new_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version) {
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *results, int *found) {
    memset(results, 0, sizeof *results);
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusName(cublasStatus_t status) { return "an error of the null GPU"; }

const char *cublasGetStatusString(cublasStatus_t status) { return "an error of the null GPU"; }

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    *handle = new_handle();
    return CUDNN_STATUS_SUCCESS;
}

// Older than the cuDNN whose attention PyTorch would take: graphs of cuDNN are beyond this library.
size_t cudnnGetVersion(void) { return 8900; }

// What torch.backends.cudnn compares with the version that PyTorch was built for. Attention of variable length asks it
// since torch 2.14.
cudnnStatus_t cudnnGetProperty(libraryPropertyType kind, int *value) {
    *value = kind == MAJOR_VERSION ? CUDNN_MAJOR : kind == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetCudartVersion(void) { return DRIVER_VERSION; }

const char *cudnnGetErrorString(cudnnStatus_t status) { return "an error of the null GPU"; }

// ---------------------------------------------------------------------------------------------------------------------
// NCCL: a communicator knows its size. A collective is recorded, and returns as if all ranks had come. Only a split needs
// the other ranks.
// ---------------------------------------------------------------------------------------------------------------------

struct ncclComm {
    int ranks, rank;
    int parent;  // ranks of the communicator that it was split from; 0: it was not
    int splits;  // of this communicator, so far
    ncclUniqueId id;
    char reserved[4096];  // PyTorch reads some of NCCL's fields beyond
};

static ncclResult_t new_communicator(ncclComm_t *communicator, int ranks, ncclUniqueId id, int rank) {
    *communicator = calloc(1, sizeof **communicator);
    (*communicator)->ranks = ranks, (*communicator)->rank = rank, (*communicator)->id = id;
    char detail[64];
    snprintf(detail, sizeof detail, "of %d", ranks);
    record("communicator", detail, 0);
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(id->internal, sizeof id->internal, "%d-%ld-%ld", getpid(), (long)now.tv_sec, now.tv_nsec);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) { return "an error of the null GPU"; }

const char *ncclGetLastError(ncclComm_t communicator) { return "an error of the null GPU"; }

ncclResult_t ncclCommInitRank(ncclComm_t *communicator, int ranks, ncclUniqueId id, int rank) {
    return new_communicator(communicator, ranks, id, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    return new_communicator(communicator, ranks, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *communicator, int ranks, int rank, int id_count, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
    return new_communicator(communicator, ranks, ids[0], rank);
}

// What the ranks of a communicator tell each other when they split it. It is in memory that their processes share.
enum { MAX_RANKS = 64, SECONDS_FOR_A_SPLIT = 120 };

typedef struct {
    atomic_int done;  // ranks that have read all entries
    struct {
        atomic_int is_there;
        int color, key;
    } of_rank[MAX_RANKS];
} Split;

// Find the size of this rank's part and its place there, once all ranks have come. Returns 0 if they do not.
static int place_in_part(ncclComm_t communicator, const char *name, int color, int key, int *ranks, int *rank) {
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || communicator->ranks > MAX_RANKS || ftruncate(file, sizeof(Split))) return 0;
    Split *split = mmap(NULL, sizeof(Split), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (split == MAP_FAILED) return 0;
    split->of_rank[communicator->rank].color = color, split->of_rank[communicator->rank].key = key;
    split->of_rank[communicator->rank].is_there = 1;
    *ranks = *rank = 0;
    int polls = 1000 * SECONDS_FOR_A_SPLIT;
    for (int other = 0; other < communicator->ranks; other++) {
        while (!split->of_rank[other].is_there && polls) usleep(1000), polls--;
        if (!polls || split->of_rank[other].color != color) continue;
        int its_key = split->of_rank[other].key;
        *ranks += 1;
        *rank += its_key < key || (its_key == key && other < communicator->rank);
    }
    if (++split->done == communicator->ranks || !polls) shm_unlink(name);
    munmap(split, sizeof(Split));
    return polls;
}

// PyTorch 2.15 asks a communicator for its size, which only the ranks of the same color know together. A single process
// that stands for one of many ranks is told the size by NULL_GPU_PART_RANKS.
ncclResult_t ncclCommSplit(ncclComm_t communicator, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
    record("communicator", "split", 0);
    char name[256];
    snprintf(name, sizeof name, "/null-gpu-%.120s.%d", communicator->id.internal, communicator->splits++);
    const char *told = getenv("NULL_GPU_PART_RANKS");
    int ranks = told ? atoi(told) : 0, rank = communicator->rank;
    if (!told && !place_in_part(communicator, name, color, key, &ranks, &rank)) {
        fprintf(stderr, "null GPU: a split of %d ranks: not all came\n", communicator->ranks);
        return ncclSystemError;
    }
    *part = NULL;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    ncclUniqueId id;
    snprintf(id.internal, sizeof id.internal, "%.100s.%d", name + strlen("/null-gpu-"), color);
    ncclResult_t result = new_communicator(part, ranks, id, rank);
    (*part)->parent = communicator->parent ? communicator->parent : communicator->ranks;
    return result;
}

ncclResult_t ncclCommCount(const ncclComm_t communicator, int *ranks) {
    *ranks = communicator->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int *rank) {
    *rank = communicator->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

static const char *dtype_name(ncclDataType_t dtype) {
    static const char *const NAMES[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",       "uint64",
                                        "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
    return (int)dtype < 12 ? NAMES[dtype] : "?";
}

static size_t dtype_bytes(ncclDataType_t dtype) {
    static const size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return (int)dtype < 12 ? BYTES[dtype] : 0;
}

static const char *operation_name(ncclRedOp_t operation) {
    static const char *const NAMES[] = {" sum", " product", " max", " min", " average"};
    return (int)operation < 5 ? NAMES[operation] : " scaled sum";
}

static ncclResult_t collective(const char *name, const char *operation, size_t count, ncclDataType_t dtype,
                               ncclComm_t communicator) {
    char detail[128];
    snprintf(detail, sizeof detail, "%s%s, %s, of %s%d", name, operation, dtype_name(dtype),
             communicator->parent ? "a part of " : "", communicator->parent ? communicator->parent : communicator->ranks);
    record("collective", detail, count * dtype_bytes(dtype));
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t operation,
                           ncclComm_t communicator, cudaStream_t stream) {
    return collective("all-reduce", operation_name(operation), count, dtype, communicator);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t operation,
                               ncclComm_t communicator, cudaStream_t stream) {
    return collective("reduce-scatter", operation_name(operation), count, dtype, communicator);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclComm_t communicator,
                           cudaStream_t stream) {
    return collective("all-gather", "", count, dtype, communicator);
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t operation, int root,
                        ncclComm_t communicator, cudaStream_t stream) {
    return collective("reduce", operation_name(operation), count, dtype, communicator);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t dtype, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
    return collective("broadcast", "", count, dtype, communicator);
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t dtype, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
    return collective("broadcast", "", count, dtype, communicator);
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t dtype, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
    return collective("send", "", count, dtype, communicator);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t dtype, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
    return collective("receive", "", count, dtype, communicator);
}
