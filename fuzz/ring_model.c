/* ring_model.c: slots of a ring as plain bytes. */
#include "ring_model.h"

#include <string.h>

void ring_model_open(ring_model *model, uint32_t n_slots, uint32_t limit)
{
    memset(model, 0, sizeof *model);
    model->n_slots = n_slots;
    model->limit = limit == 0 ? n_slots : limit;
    memset(model->slots, LET_GO, sizeof model->slots);
}

void ring_model_fill(uint8_t *slot, uint32_t page, uint32_t record_bytes)
{
    memset(slot, LET_GO, SLOT_BYTES);
    memset(slot, (int)page + 1, record_bytes);
}

void ring_model_submit(ring_model *model, uint32_t first, uint32_t n_pages, uint32_t record_bytes)
{
    const uint32_t open = ring_model_open_slots(model);
    uint32_t length = 0;
    for (uint32_t page = first; page < first + n_pages; page++) {
        const uint32_t slot = (uint32_t)((model->submitted - model->base) % open);
        if (length == 0 || length == model->limit || slot == 0) {
            model->n_runs++;
            length = 0;
        }
        length++;
        model->pages[model->submitted++] = (model_page){.page = page, .record_bytes = record_bytes, .slot = slot};
        model->copied_bytes += record_bytes;
        model->runs[model->n_runs - 1] = (model_run){
            .end = model->submitted, .gate = model->submitted > open ? model->submitted - open : 0};
    }
}

void ring_model_copy(ring_model *model, int answer)
{
    if (model->next_run == model->n_runs) {
        model->was_early = true;
        return;
    }
    const model_run *run = &model->runs[model->next_run++];
    model->was_early = model->was_early || run->gate > model->consumed;
    for (uint64_t at = model->ready; answer == 0 && at < run->end; at++) {
        model_page *page = &model->pages[at];
        page->came = true;
        ring_model_fill(model->slots[page->slot], page->page, page->record_bytes);
    }
    model->is_poisoned = model->is_poisoned || answer < 0;
    model->ready = run->end;
}

void ring_model_consume(ring_model *model, uint64_t end)
{
    for (; model->consumed < end; model->consumed++) {
        memset(model->slots[model->pages[model->consumed].slot], LET_GO, SLOT_BYTES);
    }
}

void ring_model_cancel(ring_model *model)
{
    model->next_run = model->n_runs;
    model->ready = model->submitted;
    ring_model_consume(model, model->submitted);
    model->is_poisoned = false;
}

void ring_model_hold(ring_model *model, uint32_t n_slots)
{
    for (uint32_t slot = model->n_slots - model->n_held; slot < model->n_slots - n_slots; slot++) {
        memset(model->slots[slot], LET_GO, SLOT_BYTES);
    }
    model->n_held = n_slots;
    model->base = model->submitted;
    for (uint32_t slot = ring_model_open_slots(model); slot < model->n_slots; slot++) {
        memset(model->slots[slot], HELD, SLOT_BYTES);
    }
}

uint64_t ring_model_acquirable(const ring_model *model)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < model->n_runs; i++) {
        end = model->runs[i].gate <= model->consumed ? model->runs[i].end : end;
    }
    return end;
}

uint64_t ring_model_gate(const ring_model *model, uint64_t demand)
{
    uint32_t i = 0;
    while (model->runs[i].end <= demand) {
        i++;
    }
    return model->runs[i].gate;
}

uint32_t ring_model_runnable(const ring_model *model)
{
    uint32_t n = 0;
    for (uint32_t i = model->next_run; i < model->n_runs; i++) {
        n += model->runs[i].gate <= model->consumed ? 1 : 0;
    }
    return n;
}
