/* load.h. Which thread reads which piece is not fixed. */
#include "warp_embed/load.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "platform_fault.h"
#include "warp_embed/record.h"

struct we_load {
    const we_piece *pieces;         /* [n], borrowed                                       */
    size_t          n;
    we_file         file, direct;   /* direct.handle: -1 when everything is read buffered  */
    uint64_t        direct_end;     /* whole pages of the file                             */
    atomic_size_t   next;
    atomic_ullong   done;           /* bytes                                               */
    atomic_bool     stop;
    struct failure {
        atomic_flag taken;          /* held while the rest changes: rarely, and not long   */
        size_t      piece;          /* n: none                                             */
        we_fault    fault;
    } failure;
};

we_status we_load_create(we_load **out, const char *path, const we_piece *pieces, size_t n, we_fault *fault)
{
    *out = NULL;
    we_load *load = calloc(1, sizeof *load);
    if (!load) return we_fail(fault, WE_E_MEMORY, "load", 0, 0);
    load->pieces = pieces;
    load->n = load->failure.piece = n;
    load->direct.handle = -1;
    atomic_flag_clear(&load->failure.taken);
    uint64_t bytes = 0;
    we_status status = we_file_open(&load->file, path, 0, fault);
    if (status == WE_OK) status = we_file_size(&load->file, &bytes, fault);
    if (status == WE_OK && bytes >= WE_LOAD_DIRECT) {
        we_fault ignored;
        if (we_file_open(&load->direct, path, 1, &ignored) == WE_OK && !load->direct.direct) we_file_close(&load->direct);
        load->direct_end = bytes / WE_PAGE * WE_PAGE;
    }
    if (status != WE_OK) {
        we_load_destroy(load);
        return status;
    }
    *out = load;
    return WE_OK;
}

/* A direct read covers whole pages; `pages` has room for a piece and the two around it. */
static we_status read_piece(const we_load *load, const we_piece *piece, uint8_t *pages, we_fault *fault)
{
    const uint64_t begin = piece->offset / WE_PAGE * WE_PAGE;
    const uint64_t end = (piece->offset + piece->bytes + WE_PAGE - 1) / WE_PAGE * WE_PAGE;
    if (!pages || end > load->direct_end) return we_file_read(&load->file, piece->to, piece->bytes, piece->offset, fault);
    const we_status status = we_file_read(&load->direct, pages, (size_t)(end - begin), begin, fault);
    if (status == WE_OK) memcpy(piece->to, pages + (piece->offset - begin), piece->bytes);
    return status;
}

static int is_finite(const we_piece *piece)
{
    we_matrix m = {0};              /* the piece as one column of numbers */
    m.cols = 1;
    m.group = 1;
    if (piece->scales) {
        m.encoding = WE_Q8G;
        m.rows = piece->bytes / 2;
        m.scales = (const uint16_t *)(const void *)piece->to;
    } else {
        if (piece->encoding != WE_F32 && piece->encoding != WE_BF16) return 1;
        m.encoding = piece->encoding;
        m.rows = piece->bytes / (piece->encoding == WE_F32 ? 4 : 2);
        m.payload = piece->to;
    }
    return we_matrix_is_finite(&m);
}

static void fail(we_load *load, size_t piece, const we_fault *fault)
{
    while (atomic_flag_test_and_set(&load->failure.taken)) {}
    if (piece < load->failure.piece) {
        load->failure.piece = piece;
        load->failure.fault = *fault;
    }
    atomic_flag_clear(&load->failure.taken);
    atomic_store(&load->stop, 1);
}

void we_load_work(we_load *load)
{
    we_fault fault;
    const size_t room = WE_LOAD_PIECE + 2 * WE_PAGE;
    uint8_t *pages = load->direct.handle >= 0 ? we_pages_reserve(room) : NULL;      /* refused: buffered */
    while (!atomic_load(&load->stop)) {
        const size_t i = atomic_fetch_add(&load->next, 1);
        if (i >= load->n) break;
        const we_piece *piece = &load->pieces[i];
        we_status status = read_piece(load, piece, pages, &fault);
        if (status == WE_OK && !is_finite(piece))
            status = we_fail(&fault, WE_E_NUMERIC, "numbers", (int64_t)piece->offset, 0);
        if (status != WE_OK) fail(load, i, &fault);
        else atomic_fetch_add(&load->done, piece->bytes);
    }
    we_pages_release(pages, room);
}

void we_load_stop(we_load *load) { atomic_store(&load->stop, 1); }

uint64_t we_load_done(const we_load *load) { return atomic_load(&load->done); }

we_status we_load_result(const we_load *load, size_t *piece, we_fault *fault)
{
    *piece = load->failure.piece;
    if (*piece < load->n) {
        *fault = load->failure.fault;
        return fault->status;
    }
    return atomic_load(&load->stop) ? we_fail(fault, WE_E_CANCELLED, "load", 0, 0) : WE_OK;
}

void we_load_destroy(we_load *load)
{
    if (!load) return;
    we_file_close(&load->file);
    we_file_close(&load->direct);
    free(load);
}
