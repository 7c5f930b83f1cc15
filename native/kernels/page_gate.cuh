/* page_gate.cuh: how readers of pages order themselves after the copies that bring them and before those that overwrite them.
 *
 * A copy raises `ready` behind its bytes and begins when `consumed` says that its slots are free (stream memory operations). A
 * block waits for a page before it reads it, and leaves the run of pages that it was given when it has read the last one; whoever
 * leaves a run last raises `consumed` as far as runs have been left without a gap.
 *
 * Forward progress. Blocks take their work by ticket, pages of the ring in rising order, so whoever holds a ticket runs, and so do
 * or did all of lower ones; no block of the launch holds a multiprocessor before it has a ticket. A wait for page d needs a copy that
 * waits for pages d - n_slots and before, which such blocks read; the launcher gives runs of several pages to a block only where that
 * holds for all pages of a run. Copies and words beside them take no multiprocessor. A kernel that begins early waits for what comes
 * before it, all of whose blocks have begun by then, so blocks that wait here never keep one out that they need. A wait that is
 * longer than limit_ns, or that the host gives up, sets `given_up` for all, and the pass goes on with whatever lies there, to its
 * end; the host is told by `stop`.
 *
 * Cost. Many blocks wait while few read, on the same multiprocessors. So waiting touches neither the first-level cache nor host
 * memory: plain reads of one word, the rarer the farther the page is away. A fence of the whole system, which stands behind all
 * reads of its multiprocessor, is paid once for a run, by the block that leaves it last.
 */
#ifndef KVS_KERNELS_PAGE_GATE_CUH
#define KVS_KERNELS_PAGE_GATE_CUH

#include "numeric.cuh"
#include "step_words.h"

/* Between two looks at host memory, which lies across the bus. */
#define KVS_LOOK_NS 1000000ull
/* A page takes about that long on the bus. */
#define KVS_PAGE_NS 500u
#define KVS_LEAST_NS 100u
#define KVS_MOST_NS 20000u

struct page_gate {
    const kvs_step_words *words; /* nullptr: all pages are there */
    volatile kvs_step_note *note;
    kvs_u64 first_demand;
    kvs_u32 first_page;
    kvs_u32 end_page;
    kvs_u64 ready; /* seen, the same in all threads */
};

/* `step` and `layer`: addresses of kvs_step_words and kvs_step_layer, or 0. */
__device__ inline page_gate gate_of(kvs_u64 step, kvs_u64 layer)
{
    page_gate gate = {nullptr, nullptr, 0, 0, 0, 0};
    if (step != 0 && layer != 0) {
        const kvs_step_layer *of = (const kvs_step_layer *)layer;
        gate.note = (volatile kvs_step_note *)of->note;
        gate.first_demand = of->first_demand;
        gate.first_page = of->first_page;
        gate.end_page = of->end_page;
        if (gate.first_page < gate.end_page) {
            gate.words = (const kvs_step_words *)step;
        }
    }
    return gate;
}

__device__ inline bool is_streamed(const page_gate *gate, kvs_u32 page)
{
    return gate->words != nullptr && page >= gate->first_page && page < gate->end_page;
}

#ifdef __CUDACC__

__device__ inline kvs_u64 load_relaxed(kvs_u64 address)
{
    kvs_u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

/* What was written before the value became visible is seen behind this. */
__device__ inline kvs_u64 load_acquire(kvs_u64 address)
{
    kvs_u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline kvs_u64 clock_ns()
{
    kvs_u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

#else /* run on a host, block after block, while another thread copies */

inline kvs_u64 load_relaxed(kvs_u64 address)
{
    return __atomic_load_n((const kvs_u64 *)address, __ATOMIC_RELAXED);
}

inline kvs_u64 load_acquire(kvs_u64 address)
{
    return __atomic_load_n((const kvs_u64 *)address, __ATOMIC_ACQUIRE);
}

inline kvs_u64 clock_ns()
{
    return host_clock_ns();
}

#endif

/* Tests: come late, by something of no pattern. */
__device__ inline void come_late(const kvs_step_words *words)
{
    if (words != nullptr && words->delay_ns != 0) {
        const kvs_u64 begin = clock_ns();
        const kvs_u32 mixed = ((kvs_u32)begin ^ blockIdx.x * 2654435761u ^ blockIdx.z * 40503u) * 2246822519u;
        const kvs_u32 late = (mixed >> 12) % words->delay_ns;
        while (clock_ns() - begin < late) {
            __nanosleep(200);
        }
    }
}

/* How long to look away from a page that so many others come before. */
__device__ inline kvs_u32 rest_ns(kvs_u64 distance)
{
    const kvs_u64 rest = distance * KVS_PAGE_NS;
    return rest < KVS_LEAST_NS ? KVS_LEAST_NS : rest > KVS_MOST_NS ? KVS_MOST_NS : (kvs_u32)rest;
}

/* One thread. Demands that have arrived, more than `demand`; all of them where the pass is given up. */
__device__ inline kvs_u64 poll_ready(const kvs_step_words *words, kvs_u64 demand)
{
    volatile kvs_u32 *given_up = (volatile kvs_u32 *)words->given_up, *stop = (volatile kvs_u32 *)words->stop;
    const kvs_u64 begin = clock_ns();
    kvs_u64 ready, looked = begin;
    while ((ready = load_relaxed(words->ready)) <= demand) {
        const kvs_u64 now = clock_ns();
        const bool looks = now - looked > KVS_LOOK_NS;
        looked = looks ? now : looked;
        if ((looks && *stop != 0) || now - begin > words->limit_ns || *given_up != 0) {
            *given_up = 1;
            *stop = 1;
            __threadfence_system();
            return ~0ull;
        }
        __nanosleep(rest_ns(demand - ready));
    }
    return load_acquire(words->ready);
}

/* One thread, behind a barrier after all of the block's reads: pages [begin, end) have been read. */
__device__ inline void leave_pages(const page_gate *gate, kvs_u32 begin, kvs_u32 end, kvs_u32 n_readers)
{
    if (gate->words == nullptr) {
        return;
    }
    begin = begin > gate->first_page ? begin : gate->first_page;
    end = end < gate->end_page ? end : gate->end_page;
    if (begin >= end) {
        return;
    }
    const kvs_step_words *words = gate->words;
    const kvs_u64 demand = gate->first_demand + (begin - gate->first_page);
    const kvs_u32 slot = (kvs_u32)((demand - words->base_demand) % words->n_slots);
    kvs_u32 *arrivals = (kvs_u32 *)words->arrivals + slot;
    volatile kvs_u64 *completed = (volatile kvs_u64 *)words->completed;
    unsigned long long *consumed = (unsigned long long *)words->consumed;
    __threadfence();
    if (atomicAdd(arrivals, 1u) + 1 != n_readers) {
        return;
    }
    *(volatile kvs_u32 *)arrivals = 0;
    if (end == gate->end_page) {
        gate->note->left_ns = clock_ns();
    }
    /* Before whoever overwrites the slots: this block's reads, and those that the others told of by their arrival. */
    __threadfence_system();
    completed[slot] = demand + (end - begin);
    /* Whoever completes the run at `consumed` goes on over runs that were completed before; either it sees them here, or who
     * completed them sees what it has raised. What an earlier turn of the ring has left lies behind `at`. */
    __threadfence();
    kvs_u64 at = *(volatile kvs_u64 *)consumed, next;
    while ((next = completed[(at - words->base_demand) % words->n_slots]) > at) {
        __threadfence_system();
        const kvs_u64 before = atomicCAS_system(consumed, at, next);
        at = before == at ? next : before;
        __threadfence();
    }
}

/* All threads of the block, before they read the page. `seen` lies in shared memory; a barrier lies between two calls. */
__device__ inline void await_page(page_gate *gate, kvs_u32 page, kvs_u64 *seen)
{
    if (!is_streamed(gate, page)) {
        return;
    }
    const kvs_u64 demand = gate->first_demand + (page - gate->first_page);
    if (gate->ready > demand) {
        return;
    }
    if (threadIdx.x == 0) {
        come_late(gate->words);
        if (page == gate->first_page) {
            const kvs_u64 ready = load_relaxed(gate->words->ready);
            gate->note->wanted_ns = clock_ns();
            gate->note->n_lying = ready > demand ? ready - demand : 0;
        }
        *seen = poll_ready(gate->words, demand);
    }
    __syncthreads();
    gate->ready = *seen;
}

__device__ inline kvs_u32 take_ticket(kvs_u64 address)
{
    return atomicAdd((kvs_u32 *)address, 1u);
}

#endif
