/* fake_cuda.c: a libcuda without a card: memory is the host's, copies are made at once, kernels do nothing. FAKE_CUDA_FAIL names a
 * function and which of its calls fails, with which number: "cuMemAlloc_v2 3 2". FAKE_CUDA_ARCH is the card's, 90 by default.
 * FAKE_CUDA_COUNT names a file that receives, when the process ends, how many kernels were launched, how many of them
 * early, how many into a recording and how many of those early, and how many recordings were made, launched and let go.
 * FAKE_CUDA_VERSION is the driver's, 13000 by default. FAKE_CUDA_WORDS=0: it has no stream memory operations.
 * FAKE_CUDA_KERNELS: images are paths of kernels compiled for the host (kernel_engine.py), which then run at once, or when their
 * recording is launched, block after block. Words are written at once and never waited for.
 * FAKE_CUDA_ASYNC=1: recordings run in a thread of their own, which whatever comes behind them in their stream waits for, and who
 * waits for a word waits, so that copies and kernels order themselves. FAKE_CUDA_SM: multiprocessors, 8 by default. FAKE_CUDA_LATE_US:
 * copies come up to so much late, by their number.
 *
 * FAKE_CUDA_STALL names a function and which of its calls never ends on its stream: "cuLaunchKernelEx 40". What follows in the stream
 * waits, other streams that wait for its events do too, and copies are made only when fake_cuda_resume is called. Until then a call
 * that a driver would not come back from, because it waits for the card or because a queue is full, ends the process.
 * FAKE_CUDA_BLOCK names a call that itself does not come back before fake_cuda_resume; only those of threads beside the first count. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef unsigned long long address;
struct copy_2d {
    size_t src_x, src_y;
    unsigned int src_kind;
    const void *src_host;
    address src;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    unsigned int dst_kind;
    void *dst_host;
    address dst;
    void *dst_array;
    size_t dst_pitch, width, height;
};

static int n_calls;
static int n_kernels, n_early, n_recorded, n_recorded_early, n_made, n_launched, n_destroyed, is_capturing;
static size_t n_copied;
static void *captured; /* the stream */

__attribute__((destructor)) static void tell(void)
{
    const char *path = getenv("FAKE_CUDA_COUNT");
    FILE *file = path == NULL ? NULL : fopen(path, "w");
    if (file != NULL) {
        fprintf(file, "%d %d %d %d %d %d %d\n", n_kernels, n_early, n_recorded, n_recorded_early, n_made, n_launched, n_destroyed);
        fclose(file);
    }
}

static int fails(const char *name)
{
    char wanted[64];
    int nth = 0, error = 0;
    const char *text = getenv("FAKE_CUDA_FAIL");
    if (text == NULL || sscanf(text, "%63s %d %d", wanted, &nth, &error) != 3 || strcmp(wanted, name) != 0) {
        return 0;
    }
    return __atomic_add_fetch(&n_calls, 1, __ATOMIC_RELAXED) == nth ? error : 0;
}

/* ---- streams that stand still ---- */

enum { MAX_STREAMS = 1024, QUEUE = 1000, MAX_LATE = 8192, MAX_LOOKS = 30000 };

struct stream { int is_stalled, n_queued, is_used, has_graph, is_running; pthread_t runner; };
struct event { struct stream *stream; long resumed; };
struct late { address to, from; size_t bytes; int value; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t resumed = PTHREAD_COND_INITIALIZER;
static struct stream streams[MAX_STREAMS];
static struct late late[MAX_LATE];
static int n_streams, n_late, n_strikes, n_blocks, n_looks;
static long n_resumed;

static int is_nth(const char *variable, const char *name, int *count)
{
    char wanted[64];
    int nth = 0;
    const char *text = getenv(variable);
    if (text == NULL || sscanf(text, "%63s %d", wanted, &nth) != 2 || strcmp(wanted, name) != 0) {
        return 0;
    }
    return __atomic_add_fetch(count, 1, __ATOMIC_RELAXED) == nth;
}

static void die(const char *name, const char *why)
{
    fprintf(stderr, "%s: %s, so that it does not come back\n", name, why);
    fflush(stderr);
    _exit(70);
}

/* Wait for the recording that was launched last. */
static void finish(struct stream *stream)
{
    if (stream->has_graph) {
        pthread_join(stream->runner, NULL);
        stream->has_graph = 0;
    }
}

/* One more operation in a stream; whether it waits. */
static int enters(const char *name, void *at)
{
    struct stream *stream = at;
    finish(stream);
    pthread_mutex_lock(&lock);
    if (is_nth("FAKE_CUDA_STALL", name, &n_strikes)) {
        stream->is_stalled = 1;
    }
    const int waits = stream->is_stalled;
    stream->n_queued += waits;
    if (stream->n_queued > QUEUE) {
        die(name, "the queue of its stream is full");
    }
    pthread_mutex_unlock(&lock);
    return waits;
}

static void come_late(void)
{
    static unsigned n_moves;
    const char *text = getenv("FAKE_CUDA_LATE_US");
    const unsigned n = __atomic_add_fetch(&n_moves, 1, __ATOMIC_RELAXED) * 2654435761u;
    if (text != NULL && (n >> 20) % 4 == 0) {
        usleep((n >> 8) % (unsigned)atoi(text));
    }
}

/* Bytes move now, or when the card goes on; value < 0: from another place. */
static void move(const char *name, void *stream, address to, address from, size_t bytes, int value)
{
    if (enters(name, stream)) {
        pthread_mutex_lock(&lock);
        if (n_late == MAX_LATE) {
            die(name, "there is no room for another late copy");
        }
        late[n_late++] = (struct late){to, from, bytes, value};
        pthread_mutex_unlock(&lock);
    } else if (value < 0) {
        come_late();
        memcpy((void *)to, (const void *)from, bytes);
    } else {
        memset((void *)to, value, bytes);
    }
}

/* What a driver does only when the card has finished. */
static void needs_rest(const char *name)
{
    for (int i = 0; i < n_streams; i++) {
        if (streams[i].is_stalled) {
            die(name, "the card is at work");
        }
    }
}

/* The card goes on: what is late happens. */
void fake_cuda_resume(void)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_late; i++) {
        if (late[i].value < 0) {
            memcpy((void *)late[i].to, (const void *)late[i].from, late[i].bytes);
        } else {
            memset((void *)late[i].to, late[i].value, late[i].bytes);
        }
    }
    n_late = n_looks = 0;
    for (int i = 0; i < n_streams; i++) {
        streams[i].is_stalled = streams[i].n_queued = 0;
    }
    n_resumed++;
    pthread_cond_broadcast(&resumed);
    pthread_mutex_unlock(&lock);
}

/* A call that does not come back of itself. */
static void block(const char *name)
{
    if (syscall(SYS_gettid) == getpid()) {
        return;
    }
    pthread_mutex_lock(&lock);
    for (const long before = n_resumed; is_nth("FAKE_CUDA_BLOCK", name, &n_blocks);) {
        while (n_resumed == before) {
            pthread_cond_wait(&resumed, &lock);
        }
    }
    pthread_mutex_unlock(&lock);
}

/* Whoever looks for ever is told apart from whoever gives up. */
static int not_ready(const char *name, int waits)
{
    if (waits && __atomic_add_fetch(&n_looks, 1, __ATOMIC_RELAXED) > MAX_LOOKS) {
        die(name, "it is asked again and again");
    }
    return waits ? 600 : 0;
}

static int is_stalled(const struct stream *stream)
{
    pthread_mutex_lock(&lock);
    const int waits = stream->is_stalled;
    pthread_mutex_unlock(&lock);
    return waits;
}

/* An event that was recorded in a stream that stood still, and has not gone on since. */
static int is_ahead(const struct event *event)
{
    pthread_mutex_lock(&lock);
    const int waits = event->stream != NULL && event->stream->is_stalled && event->resumed == n_resumed;
    pthread_mutex_unlock(&lock);
    return waits;
}

#define BEGIN                                                                                                          \
    block(__func__);                                                                                                   \
    int error = fails(__func__);                                                                                       \
    if (error != 0) {                                                                                                  \
        return error;                                                                                                  \
    }

static int arch(void)
{
    const char *text = getenv("FAKE_CUDA_ARCH");
    return text == NULL ? 90 : atoi(text);
}

int cuInit(unsigned int flags) { BEGIN (void)flags; return 0; }
int cuDriverGetVersion(int *version)
{
    const char *text = getenv("FAKE_CUDA_VERSION");
    *version = text == NULL ? 13000 : atoi(text);
    return 0;
}
int cuGetErrorName(int error, const char **name) { *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = error == 2 ? "out of memory" : "as was asked for"; return 0; }
int cuDeviceGetCount(int *count) { BEGIN *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { BEGIN *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { (void)device; snprintf(name, (size_t)length, "Fake card"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)8 << 30; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { BEGIN (void)device; *context = &n_calls; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { needs_rest(__func__); (void)device; return 0; }
int cuCtxPushCurrent_v2(void *context) { (void)context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = NULL; return 0; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = (size_t)7 << 30; *total = (size_t)8 << 30; return 0; }
int cuPointerGetAttribute(void *data, int attribute, address at) { BEGIN (void)at; *(int *)data = attribute == 2 ? 2 : 0; return 0; }
int cuMemFree_v2(address at) { needs_rest(__func__); free((void *)at); return 0; }
int cuMemFreeHost(void *memory) { needs_rest(__func__); free(memory); return 0; }
/* FAKE_CUDA_LOCK: more bytes at once than this are refused. */
int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned int flags)
{
    BEGIN
    const char *limit = getenv("FAKE_CUDA_LOCK");
    (void)memory; (void)flags;
    return limit != NULL && bytes > strtoull(limit, NULL, 10) ? 304 : 0;
}
/* What would break a recording, or become part of it unasked. */
static int disturbs(const void *stream) { return is_capturing && stream == captured ? 900 : 0; }
int cuMemHostUnregister(void *memory) { needs_rest(__func__); (void)memory; return 0; }
int cuStreamDestroy_v2(void *stream) { ((struct stream *)stream)->is_used = 0; return 0; }
int cuStreamQuery(void *stream)
{
    BEGIN
    const struct stream *asked = stream;
    if (disturbs(stream)) {
        return 900;
    }
    return __atomic_load_n(&asked->is_running, __ATOMIC_ACQUIRE) ? 600 : not_ready(__func__, is_stalled(stream));
}
int cuStreamWaitEvent(void *stream, void *event, unsigned int flags)
{
    BEGIN
    (void)flags;
    if (is_ahead(event)) {
        pthread_mutex_lock(&lock);
        ((struct stream *)stream)->is_stalled = 1;
        pthread_mutex_unlock(&lock);
    }
    enters(__func__, stream);
    return 0;
}
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuEventRecord(void *event, void *stream)
{
    BEGIN
    const int waits = enters(__func__, stream);
    pthread_mutex_lock(&lock);
    *(struct event *)event = (struct event){waits ? stream : NULL, n_resumed};
    pthread_mutex_unlock(&lock);
    return disturbs(stream);
}
int cuEventQuery(void *event) { BEGIN return not_ready(__func__, is_ahead(event)); }
int cuModuleUnload(void *module) { needs_rest(__func__); (void)module; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { (void)function; (void)attribute; (void)value; return 0; }

static int n_sm(void)
{
    const char *text = getenv("FAKE_CUDA_SM");
    return text == NULL ? 8 : atoi(text);
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    BEGIN
    (void)device;
    if (attribute == 122) {
        const char *words = getenv("FAKE_CUDA_WORDS");
        *value = words == NULL || atoi(words) != 0;
        return 0;
    }
    *value = attribute == 75 ? arch() / 10 : attribute == 76 ? arch() % 10 : attribute == 97 ? 101376 : attribute == 16 ? n_sm() : 1;
    return 0;
}

int cuMemAlloc_v2(address *at, size_t bytes)
{
    BEGIN
    void *memory = NULL;
    if (posix_memalign(&memory, 512, bytes) != 0) {
        return 2;
    }
    memset(memory, 0, bytes);
    *at = (address)memory;
    return 0;
}

int cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
    BEGIN
    (void)flags;
    return posix_memalign(memory, 4096, bytes) == 0 ? 0 : 2;
}

int cuMemcpyAsync(address to, address from, size_t bytes, void *stream)
{
    BEGIN
    __atomic_add_fetch(&n_copied, bytes, __ATOMIC_RELAXED);
    move(__func__, stream, to, from, bytes, -1);
    return disturbs(stream);
}

int cuMemcpy2DAsync_v2(const struct copy_2d *copy, void *stream)
{
    BEGIN
    for (size_t row = 0; row < copy->height; row++) {
        move(row == 0 ? __func__ : "", stream, copy->dst + row * copy->dst_pitch, copy->src + row * copy->src_pitch, copy->width, -1);
    }
    return 0;
}

int cuMemsetD8Async(address at, unsigned char value, size_t bytes, void *stream)
{
    BEGIN
    move(__func__, stream, at, 0, bytes, value);
    return disturbs(stream);
}

int cuStreamCreate(void **stream, unsigned int flags)
{
    BEGIN
    (void)flags;
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < n_streams && (streams[at].is_used || streams[at].is_stalled)) {
        at++;
    }
    n_streams = at < n_streams || at == MAX_STREAMS ? n_streams : at + 1;
    if (at < MAX_STREAMS) {
        streams[at] = (struct stream){.is_used = 1};
        *stream = &streams[at];
    }
    pthread_mutex_unlock(&lock);
    return at < MAX_STREAMS ? 0 : 2;
}

int cuEventCreate(void **event, unsigned int flags)
{
    BEGIN
    (void)flags;
    *event = calloc(1, sizeof(struct event));
    return 0;
}

int cuModuleLoadData(void **module, const void *image)
{
    BEGIN
    *module = getenv("FAKE_CUDA_KERNELS") != NULL ? dlopen(image, RTLD_NOW | RTLD_LOCAL) : &n_calls;
    return *module == NULL ? 200 : 0;
}

/* A kernel compiled for the host, and the bytes of its argument. */
struct function {
    void (*run)(const void *params, const unsigned int *grid, unsigned int n_threads);
    size_t bytes;
};

static struct function *find_kernel(void *library, const char *name, const char *bytes_name)
{
    void *run = dlsym(library, name);
    const unsigned int *bytes = dlsym(library, bytes_name);
    struct function *found = run == NULL || bytes == NULL ? NULL : malloc(sizeof *found);
    if (found != NULL) {
        *found = (struct function){.bytes = *bytes};
        memcpy(&found->run, &run, sizeof run);
    }
    return found;
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    BEGIN
    char entry[80], bytes[88];
    snprintf(entry, sizeof entry, "host_%s", name);
    snprintf(bytes, sizeof bytes, "%s_bytes", entry);
    *function = module == &n_calls ? module : find_kernel(module, entry, bytes);
    return *function == NULL ? 500 : 0;
}

/* What has been recorded; a graph and what is made of it share it. */
struct node {
    const struct function *kernel;
    void *params;
    unsigned int grid[3], n_threads;
};

struct graph {
    int n_owners, n_nodes;
    struct node *nodes;
};

static struct graph *recording;

static int record(const struct function *kernel, const void *params, const unsigned int *grid, unsigned int n_threads)
{
    struct node *nodes = realloc(recording->nodes, (size_t)(recording->n_nodes + 1) * sizeof *nodes);
    void *copy = malloc(kernel->bytes);
    if (nodes == NULL || copy == NULL) {
        abort();
    }
    memcpy(copy, params, kernel->bytes);
    nodes[recording->n_nodes++] = (struct node){kernel, copy, {grid[0], grid[1], grid[2]}, n_threads};
    recording->nodes = nodes;
    return 0;
}

static void let_go(struct graph *graph)
{
    if (graph == NULL || --graph->n_owners != 0) {
        return;
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        free(graph->nodes[i].params);
    }
    free(graph->nodes);
    free(graph);
}

struct launch {
    unsigned int grid[3], block[3], shared;
    void *stream;
    const unsigned int *attributes;
    unsigned int n_attributes;
};

/* The one attribute that is used is number 6, which is on. */
int cuLaunchKernelEx(const struct launch *config, void *function, void **params, void **extra)
{
    BEGIN
    (void)extra;
    enters(__func__, config->stream);
    const unsigned int blocks = config->grid[0] * config->grid[1] * config->grid[2];
    const unsigned int threads = config->block[0] * config->block[1] * config->block[2];
    const int is_early = config->n_attributes == 1 && config->attributes[0] == 6 && config->attributes[2] == 1;
    n_kernels++;
    n_early += is_early;
    n_recorded += is_capturing;
    n_recorded_early += is_capturing && is_early;
    if (blocks == 0 || threads == 0 || threads > 1024 || config->shared > 101376 || (config->n_attributes != 0 && !is_early)) {
        return 1;
    }
    if (function == &n_calls) {
        return 0;
    }
    const struct function *kernel = function;
    if (is_capturing && config->stream == captured) {
        return record(kernel, params[0], config->grid, threads);
    }
    kernel->run(params[0], config->grid, threads);
    return 0;
}

static int is_async(void)
{
    return getenv("FAKE_CUDA_ASYNC") != NULL;
}

/* In the call, so that no more is given to the stream meanwhile: copies come from a thread that has nothing else to do. */
int cuStreamWaitValue64_v2(void *stream, address word, unsigned long long value, unsigned int flags)
{
    BEGIN
    (void)flags;
    while (is_async() && __atomic_load_n((unsigned long long *)word, __ATOMIC_ACQUIRE) < value) {
        sched_yield();
    }
    return disturbs(stream);
}

int cuStreamWriteValue64_v2(void *stream, address word, unsigned long long value, unsigned int flags)
{
    BEGIN
    (void)flags;
    __atomic_store_n((unsigned long long *)word, value, __ATOMIC_RELEASE);
    return disturbs(stream);
}

/* A capture that nobody ends, or that a second one interrupts, is an error as with the real one. */
int cuStreamBeginCapture_v2(void *stream, int mode)
{
    BEGIN
    (void)mode;
    if (is_capturing) {
        return 900;
    }
    captured = stream;
    is_capturing = 1;
    let_go(recording); /* of a capture whose end failed */
    recording = calloc(1, sizeof *recording);
    recording->n_owners = 1;
    return 0;
}

int cuStreamEndCapture(void *stream, void **graph)
{
    (void)stream;
    const int was_capturing = is_capturing;
    is_capturing = 0;
    *graph = NULL;
    BEGIN
    *graph = recording;
    recording = NULL;
    return was_capturing ? 0 : 900;
}

int cuGraphDestroy(void *graph) { let_go(graph); return 0; }

int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags)
{
    BEGIN
    (void)flags;
    ((struct graph *)graph)->n_owners++;
    *exec = graph;
    n_made++;
    return 0;
}

int cuGraphUpload(void *exec, void *stream) { BEGIN (void)exec; enters(__func__, stream); return 0; }

static void run_graph(const struct graph *graph)
{
    for (int i = 0; i < graph->n_nodes; i++) {
        graph->nodes[i].kernel->run(graph->nodes[i].params, graph->nodes[i].grid, graph->nodes[i].n_threads);
    }
}

struct run { const struct graph *graph; struct stream *stream; };

static void *run_apart(void *argument)
{
    const struct run run = *(struct run *)argument;
    free(argument);
    run_graph(run.graph);
    __atomic_store_n(&run.stream->is_running, 0, __ATOMIC_RELEASE);
    return NULL;
}

int cuGraphLaunch(void *exec, void *at)
{
    BEGIN
    struct stream *stream = at;
    enters(__func__, stream);
    n_launched++;
    if (is_capturing) {
        return 900;
    }
    if (!is_async()) {
        run_graph(exec);
        return 0;
    }
    struct run *run = malloc(sizeof *run);
    *run = (struct run){exec, stream};
    stream->is_running = stream->has_graph = 1;
    return pthread_create(&stream->runner, NULL, run_apart, run) == 0 ? 0 : 2;
}

int cuGraphExecDestroy(void *exec) { let_go(exec); n_destroyed++; return 0; }

/* For a process that fails one call after another: count from 0 again; calls counted since. */
void fake_cuda_reset(void)
{
    __atomic_store_n(&n_calls, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&n_strikes, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&n_blocks, 0, __ATOMIC_RELAXED);
}
int fake_cuda_stalls(void) { return __atomic_load_n(&n_strikes, __ATOMIC_RELAXED); }
/* Bytes of all cuMemcpyAsync. */
size_t fake_cuda_copied(void) { return __atomic_load_n(&n_copied, __ATOMIC_RELAXED); }
int fake_cuda_calls(void) { return __atomic_load_n(&n_calls, __ATOMIC_RELAXED); }
